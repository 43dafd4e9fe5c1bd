"""A target and a draft that answer at once, over real gRPC: `python -m bench.gateway.replicas`.

All answers are one text, over and over, so no prompt is read and a draft token is always right. A step
answers up to --batch requests of a stream in one message, as a target replica of so many sessions does.
Without --rate, a step begins as soon as the transport has taken the one before. With it, all streams that
have requests share so many verdicts a second. The process shares the machine with the gateway that is
measured, so it checks nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc

from galley.bench.workloads import fixed_workload
from galley.common.models.tokenizer import Tokenizer
from galley.common.server.loop import ServiceLoop
from galley.common.server.process import Readiness
from galley.core.content import prefix_hash
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc

MODEL = "answers-at-once"
CONTEXT = 1 << 16
MAX_DRAFT_TOKENS = 64
_STEP_NS, _ROW_NS = 20_000_000, 100_000
# Longest wait for a draft that is due, as in services/target/servicer.py.
_LINGER_S = 0.05


class Text:
    """The tokens of every answer: a text that repeats."""

    def __init__(self, tokens: list[int]) -> None:
        self._len = len(tokens)
        self._tokens = tokens * (2 + MAX_DRAFT_TOKENS // self._len)

    def tokens(self, position: int, count: int) -> list[int]:
        """Return the tokens of [position, position + count); `count` is at most MAX_DRAFT_TOKENS + 1."""
        start = position % self._len
        return self._tokens[start : start + count]


@dataclass(slots=True)
class _Request:
    """An open request: its next position, its limit, and the position at which its drafts end."""

    session_id: str
    request_id: int
    position: int
    limit: int
    last: int
    goes_on: bool
    max_verified: int
    drafted_to: int
    hint_due: bool

    @property
    def end(self) -> int:
        return min(self.limit, self.last)

    @property
    def lingers(self) -> bool:
        return self.hint_due and self.drafted_to <= self.position

    def extend(self, extension: pb.Extension) -> None:
        self.limit = max(self.limit, extension.limit)
        self.hint_due = extension.hint_due
        if extension.HasField("hint"):
            self.drafted_to = extension.hint.position + len(extension.hint.draft_tokens)


def _request_of(item: pb.VerifyItem) -> _Request:
    part = item.slice
    position, drafted = part.start + len(part.tokens), len(item.draft_tokens)
    return _Request(
        part.session_id,
        part.request_id,
        position,
        position + drafted + 1 + item.credit,
        part.max_position,
        item.credit > 0,
        item.max_verified or MAX_DRAFT_TOKENS,
        position + drafted,
        item.hint_due,
    )


@dataclass(slots=True)
class VerdictQueue:
    """The open requests of one stream: those of the next steps, in turn, and those that wait for a hint."""

    text: Text
    batch: int
    open: dict[int, _Request] = field(default_factory=dict)
    ready: deque[_Request] = field(default_factory=deque)
    lingering: dict[int, _Request] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, messages: AsyncIterator[pb.VerifyStreamRequest]) -> None:
        async for message in messages:
            self.receive(message)

    def receive(self, message: pb.VerifyStreamRequest) -> None:
        """Open, extend and cancel requests."""
        for item in message.items:
            request = self.open[item.slice.request_id] = _request_of(item)
            self._queue(request)
        for extension in message.extensions:
            if (extended := self.open.get(extension.request_id)) is not None:
                extended.extend(extension)
                if self.lingering.pop(extension.request_id, None) is not None:
                    self._queue(extended)
        for ref in message.cancelled:
            self.open.pop(ref.request_id, None)
            self.lingering.pop(ref.request_id, None)

    def _queue(self, request: _Request) -> None:
        if request.lingers:
            self.lingering[request.request_id] = request
        else:
            self.ready.append(request)
            self.changed.set()

    async def step(self) -> list[pb.VerifyAnswer]:
        """Wait until requests are ready; return the verdicts of one step."""
        while not self.ready:
            self.changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LINGER_S if self.lingering else None):
                    await self.changed.wait()
            if not self.ready:
                self.ready.extend(self.lingering.values())
                self.lingering.clear()
        taken = [self.ready.popleft() for _ in range(min(self.batch, len(self.ready)))]
        running = [request for request in taken if request.request_id in self.open]
        return [self._verdict(request, len(running)) for request in running]

    def _verdict(self, request: _Request, sessions: int) -> pb.VerifyAnswer:
        position = request.position
        drafted = min(request.drafted_to - position, request.max_verified, request.end - position - 1)
        count = max(0, drafted)
        request.position += count + 1
        more = request.goes_on and request.position < request.end
        if more:
            self._queue(request)
        else:
            del self.open[request.request_id]
        result = pb.VerifyResult(
            position=position,
            tokens=self.text.tokens(position, count + 1),
            accepted=count,
            verified=count,
            kv_len=request.position - 1,
            fingerprint=MODEL,
            timing=pb.Timing(compute_ns=_STEP_NS),
            batch_sessions=sessions,
            more=more,
            row_ns=_ROW_NS,
            plain_ns=_STEP_NS,
            batch_rows=sessions,
        )
        return pb.VerifyAnswer(session_id=request.session_id, request_id=request.request_id, result=result)


class InstantReplica(rpc.TargetServicer, rpc.DraftServicer):
    """The servicer of both pools."""

    def __init__(self, tokenizer: Tokenizer, batch: int, rate: float) -> None:
        text = "\n".join(prompt.text for prompt in fixed_workload("chat").prompts)
        self._text = Text(tokenizer.encode(text))
        self._tokenizer = tokenizer
        self._batch = batch
        self._rate = rate
        self._held: dict[str, list[int]] = {}
        self._streams: list[VerdictQueue] = []

    async def Verify(self, request: pb.VerifyRequest, context: Any) -> pb.VerifyResponse:
        raise NotImplementedError

    async def Propose(self, request: pb.ProposeRequest, context: Any) -> pb.ProposeResponse:
        raise NotImplementedError

    async def LoadDraft(self, request_iterator: object, context: Any) -> pb.LoadDraftResponse:
        raise NotImplementedError

    async def GetTargetInfo(
        self,
        request: pb.GetTargetInfoRequest,
        context: Any,
    ) -> pb.GetTargetInfoResponse:
        return pb.GetTargetInfoResponse(
            model=MODEL,
            tokenizer_hash=self._tokenizer.hash,
            context_window=CONTEXT,
            vocab_size=self._tokenizer.vocab_size,
            fingerprint=MODEL,
            deterministic=True,
            incarnation=MODEL,
            max_draft_tokens=MAX_DRAFT_TOKENS,
            row_costs=[pb.RowCost(rows=1, ns=_STEP_NS), pb.RowCost(rows=64, ns=_STEP_NS + 64 * _ROW_NS)],
        )

    async def VerifyStream(
        self,
        request_iterator: AsyncIterator[pb.VerifyStreamRequest],
        context: Any,
    ) -> AsyncIterator[pb.VerifyStreamResponse]:
        stream = VerdictQueue(self._text, self._batch)
        self._streams.append(stream)
        reader = asyncio.create_task(stream.read(request_iterator))
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        try:
            while True:
                answers = await stream.step()
                yield pb.VerifyStreamResponse(answers=answers)
                if self._rate:
                    # A stream that had nothing to do makes up for none of it.
                    sharing = sum(bool(other.open) for other in self._streams)
                    due_s = max(due_s, loop.time() - 1) + len(answers) * max(1, sharing) / self._rate
                    await asyncio.sleep(max(0.0, due_s - loop.time()))
        finally:
            self._streams.remove(stream)
            reader.cancel()

    async def GetDraftInfo(
        self,
        request: pb.GetDraftInfoRequest,
        context: Any,
    ) -> pb.GetDraftInfoResponse:
        return pb.GetDraftInfoResponse(
            model=MODEL,
            tokenizer_hash=self._tokenizer.hash,
            strategies=["model"],
            default_strategy="model",
            incarnation=MODEL,
            max_draft_tokens=MAX_DRAFT_TOKENS,
            vocab_size=self._tokenizer.vocab_size,
        )

    async def ProposeStream(
        self,
        request_iterator: AsyncIterator[pb.ProposeStreamRequest],
        context: Any,
    ) -> AsyncIterator[pb.ProposeStreamResponse]:
        async for message in request_iterator:
            if message.items:
                yield pb.ProposeStreamResponse(answers=[self._propose(item) for item in message.items])

    def _propose(self, item: pb.ProposeItem) -> pb.ProposeAnswer:
        part = item.slice
        held = self._held.setdefault(part.session_id, [])
        held[part.start :] = part.tokens
        result = pb.ProposeResult(
            position=len(held),
            prefix_hash=prefix_hash(held),
            draft_tokens=self._text.tokens(len(held), item.k),
            kv_len=len(held),
            timing=pb.Timing(compute_ns=_ROW_NS),
        )
        return pb.ProposeAnswer(session_id=part.session_id, request_id=part.request_id, result=result)


async def _serve(options: argparse.Namespace) -> None:
    tokenizer = await asyncio.to_thread(Tokenizer.load, options.model)
    replica = InstantReplica(tokenizer, options.batch, options.rate)
    server = grpc.aio.server()
    rpc.add_TargetServicer_to_server(replica, server)
    rpc.add_DraftServicer_to_server(replica, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    over = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    Readiness(options.ready_fd).ready(f"127.0.0.1:{port}")
    await over.wait()
    await server.stop(None)


def main() -> None:
    """Serve on a free port until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m bench.gateway.replicas", description=__doc__)
    parser.add_argument("--ready-fd", type=int)
    parser.add_argument("--model", required=True, help="directory of the tokenizer")
    parser.add_argument("--batch", type=int, default=64, help="most verdicts of a step (default: 64)")
    parser.add_argument("--rate", type=float, default=0.0, help="verdicts a second; 0: at once")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=ServiceLoop) as runner:
        runner.run(_serve(options))


if __name__ == "__main__":
    main()
