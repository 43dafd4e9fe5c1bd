"""Verify requests, and clients of `Verify` and `VerifyStream` that send them step by step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from galley.core.content import common_prefix_len, prefix_hash
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from tests.fakes.tiny_model import CONTEXT

_TIMEOUT_S = 20
_NOBODY = "nobody"
GREEDY = pb.SamplingParams(temperature=0)


def slice_of(
    confirmed: Sequence[int], *, start: int = 0, session_id: str = "s", **given: Any
) -> pb.SessionSlice:
    """Return the slice of a session with its `confirmed` tokens from `start` on."""
    fields: dict[str, Any] = {
        "session_id": session_id,
        "request_id": 7,
        "start": start,
        "tokens": confirmed[start:],
        "prefix_hash": prefix_hash(confirmed[:start]),
        "prompt_len": min(4, len(confirmed)),
        "max_position": CONTEXT,
        "sampling": GREEDY,
    }
    return pb.SessionSlice(**(fields | given))


async def verify(target: rpc.TargetAsyncStub, *items: pb.VerifyItem) -> list[pb.VerifyAnswer]:
    return list((await target.Verify(pb.VerifyRequest(items=items))).answers)


async def generate(
    target: rpc.TargetAsyncStub,
    prompt: list[int],
    count: int,
    draft: Callable[[list[int]], list[int]],
    **given: Any,
) -> tuple[list[int], list[int]]:
    tokens, held, accepted = list(prompt), 0, []
    given |= {"prompt_len": len(prompt), "max_position": len(prompt) + count}
    stop = set(given.get("stop_token_ids", ()))
    while len(tokens) < len(prompt) + count and not (stop & set(tokens[len(prompt) :])):
        guesses = draft(tokens)
        item = pb.VerifyItem(slice=slice_of(tokens, start=held, **given), draft_tokens=guesses)
        (answer,) = await verify(target, item)
        assert answer.WhichOneof("outcome") == "result", answer
        result = answer.result
        assert result.position == len(tokens)
        assert result.accepted == common_prefix_len(guesses[: result.verified], result.tokens)
        tokens += result.tokens
        held = result.kv_len
        assert held == len(tokens) - 1
        accepted.append(result.accepted)
    return tokens[len(prompt) :], accepted


class Stream:
    """One VerifyStream; a wait for a response fails after _TIMEOUT_S."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self._read: list[pb.VerifyAnswer] = []

    async def send(
        self,
        *items: pb.VerifyItem,
        cancelled: Sequence[pb.ItemRef] = (),
        extensions: Sequence[pb.Extension] = (),
    ) -> None:
        await self.call.write(pb.VerifyStreamRequest(items=items, cancelled=cancelled, extensions=extensions))

    async def next(self) -> pb.VerifyAnswer:
        if not self._read:
            await self._receive()
        return self._read.pop(0)

    async def _receive(self) -> None:
        async with asyncio.timeout(_TIMEOUT_S):
            response = await self.call.read()
        assert isinstance(response, pb.VerifyStreamResponse), "the stream has ended"
        self._read += response.answers

    async def received(self) -> None:
        await self.send(pb.VerifyItem(slice=pb.SessionSlice(session_id=_NOBODY)))
        while not any(answer.session_id == _NOBODY for answer in self._read):
            await self._receive()
        self._read = [answer for answer in self._read if answer.session_id != _NOBODY]

    async def until_last(self) -> list[pb.VerifyAnswer]:
        answers = [await self.next()]
        while answers[-1].result.more:
            answers.append(await self.next())
        return answers


@asynccontextmanager
async def stream_of(target: rpc.TargetAsyncStub) -> AsyncIterator[Stream]:
    call = target.VerifyStream()
    try:
        yield Stream(call)
    finally:
        call.cancel()


def extension(tokens: Sequence[int], draft: Sequence[int] | None = None, **given: Any) -> pb.Extension:
    fields: dict[str, Any] = {"session_id": "s", "request_id": 7}
    made = pb.Extension(**(fields | given))
    if draft is not None:
        made.hint.CopyFrom(pb.Hint(position=len(tokens), prefix_hash=prefix_hash(tokens), draft_tokens=draft))
    return made


def tokens_of(answers: Sequence[pb.VerifyAnswer]) -> list[int]:
    return [token for answer in answers for token in answer.result.tokens]
