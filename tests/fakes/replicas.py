"""A target and a draft over real gRPC with known responses, which fail on request."""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import grpc

from galley.common.server.requests import respond_stream
from galley.common.wire.codec import check_lora, check_token_ids, logprobs_message, read_slice
from galley.common.wire.status import item_status
from galley.core.content import Miss, prefix_hash
from galley.core.errors import InvalidField
from galley.core.features import MAX_FEATURE_TOKENS
from galley.core.grammar.spec import KINDS
from galley.core.hints import MAX_HINT_TOKENS, Hint
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from tests.fakes.certificates import caller_of
from tests.fakes.target import OpenRequest, admit
from tests.fakes.truth import CONTEXT, END, VOCAB, NextToken, logprobs_of, true_next
from tests.fakes.waiting import Gate, Watch

MAX_DRAFT_TOKENS = 16
# The reported time of a step, as long as a real model's, so that speculation pays.
PASS_NS = 20_000_000
MODEL = "tiny"
STRATEGIES: tuple[str, ...] = ("model", "ngram")
STATE_SIZE = 2


def states_of(positions: Iterable[int], layers: Sequence[int]) -> bytes:
    """Return the states of tokens after these layers: each names its position and its layer."""
    return b"".join(struct.pack("<HH", position, layer) for position in positions for layer in layers)


class _Failure(Exception):
    def __init__(self, code: grpc.StatusCode) -> None:
        super().__init__(code.name)
        self.code = code


class Replica:
    """A server on a unix socket with a gate; `answered` counts the requests that passed the gate."""

    def __init__(self, directory: Path, name: str) -> None:
        self.address = f"unix:{directory / name}"
        self.gate = Gate()
        self.watch = Watch()
        self.calls: list[Any] = []
        self.answered = 0
        self.cancelled = 0
        self._waiting = 0
        self.failure: grpc.StatusCode | None = None
        self.failures_left = 0
        self.incarnations = 0
        self.credentials: grpc.ServerCredentials | None = None
        self.streams: list[str] = []
        self._held: dict[str, list[int]] = {}
        self._server: grpc.aio.Server | None = None

    def _serve(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    async def start(self) -> None:
        self.incarnations += 1
        self._held.clear()
        self._server = grpc.aio.server()
        self._serve(self._server)
        if self.credentials is None:
            self._server.add_insecure_port(self.address)
        else:
            self._server.add_secure_port(self.address, self.credentials)
        await self._server.start()

    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)

    def forget(self) -> None:
        self.incarnations += 1
        self._held.clear()

    def fail(self, code: grpc.StatusCode, times: int) -> None:
        self.failure, self.failures_left = code, times

    async def called(self, times: int) -> None:
        await self.watch.until(lambda: len(self.calls) >= times)

    async def has_answered(self, times: int) -> None:
        await self.watch.until(lambda: self.answered >= times)

    async def waits_after(self, times: int) -> None:
        await self.watch.until(lambda: self.answered >= times and self._waiting > 0)

    async def was_cancelled(self, times: int = 1) -> None:
        await self.watch.until(lambda: self.cancelled >= times)

    @contextmanager
    def _open_stream(self, context: Any) -> Iterator[None]:
        caller = caller_of(context)
        self.streams.append(caller)
        self.watch.changed()
        try:
            yield
        finally:
            self.streams.remove(caller)
            self.watch.changed()

    async def _enter(self, item: Any) -> None:
        self.calls.append(item)
        self.watch.changed()
        try:
            await self._pass_gate()
        except asyncio.CancelledError:
            self.cancelled += 1
            self.watch.changed()
            raise

    async def _pass_gate(self) -> None:
        self._waiting += 1
        self.watch.changed()
        try:
            await self.gate.enter()
        finally:
            self._waiting -= 1
        self.answered += 1
        self.watch.changed()
        if self.failures_left > 0 and self.failure is not None:
            self.failures_left -= 1
            raise _Failure(self.failure)

    def _admit(self, part: pb.SessionSlice) -> Miss | list[int]:
        return admit(self._held.get(part.session_id, []), part)


class FakeTarget(Replica, rpc.TargetServicer):
    """Decode `true_next`; with credit, a step takes `pass_s` seconds and passes the gate."""

    def __init__(self, directory: Path, tokenizer_hash: str) -> None:
        super().__init__(directory, "target")
        self.tokenizer_hash = tokenizer_hash
        self.model, self.weights_digest = MODEL, ""
        self.fingerprint = "build-1"
        self.lora_adapters: Sequence[str] = ()
        self.grammar_kinds: Sequence[str] = KINDS
        self.trees = False
        self.feature_size = self.feature_layers = 0
        self.row_costs: tuple[tuple[int, int], ...] = ()
        self.host = pb.Host()
        self.info_gate = Gate()
        self.item_failure: grpc.StatusCode | None = None
        self.misses = 0
        self.pass_s = 0.0
        self.extensions: list[pb.Extension] = []
        self.preemptions_left = 0
        self.kv_blocks_total = 0
        self.kv_blocks_free = 0
        self.queue_depth = 0
        self.described = 0
        self.confirmed: Counter[str] = Counter()
        self.spoil: Callable[[pb.VerifyResult], None] = lambda _: None
        self.truth: Callable[[pb.SessionSlice], NextToken] = lambda _: true_next

    def _serve(self, server: grpc.aio.Server) -> None:
        rpc.add_TargetServicer_to_server(self, server)

    async def GetTargetInfo(self, request: pb.GetTargetInfoRequest, context: Any) -> pb.GetTargetInfoResponse:
        await self.info_gate.enter()
        self.described += 1
        self.watch.changed()
        return pb.GetTargetInfoResponse(
            model=self.model,
            weights_digest=self.weights_digest,
            tokenizer_hash=self.tokenizer_hash,
            context_window=CONTEXT,
            vocab_size=VOCAB,
            eos_token_ids=[END],
            fingerprint=self.fingerprint,
            deterministic=True,
            incarnation=f"target-{self.incarnations}",
            max_draft_tokens=MAX_DRAFT_TOKENS,
            dtype="float32",
            device="none",
            kv_block_tokens=32,
            kv_blocks_total=self.kv_blocks_total,
            kv_blocks_free=self.kv_blocks_free,
            queue_depth=self.queue_depth,
            row_costs=[pb.RowCost(rows=rows, ns=ns) for rows, ns in self.row_costs],
            lora_adapters=self.lora_adapters,
            grammar_kinds=self.grammar_kinds,
            host=self.host,
            trees=self.trees,
            feature_size=self.feature_size,
            feature_layers=self.feature_layers,
        )

    async def Verify(self, request: Any, context: Any) -> pb.VerifyResponse:
        raise NotImplementedError

    async def VerifyStream(
        self, request_iterator: AsyncIterator[pb.VerifyStreamRequest], context: Any
    ) -> AsyncIterator[pb.VerifyStreamResponse]:
        stream = _TargetStream(self)
        reader = asyncio.create_task(stream.read(request_iterator))
        try:
            with self._open_stream(context):
                while (answer := await stream.answers.get()) is not None:
                    if isinstance(answer, _Failure):
                        raise answer
                    yield pb.VerifyStreamResponse(answers=[answer])
        except _Failure as failure:
            await context.abort(failure.code, "requested by the test")
        finally:
            await stream.stop(reader)

    async def extended(self, holds: Callable[[pb.Extension], bool]) -> None:
        await self.watch.until(lambda: any(map(holds, self.extensions)))

    async def run(self, open_request: OpenRequest[pb.VerifyItem]) -> AsyncIterator[pb.VerifyAnswer]:
        item, more = open_request.verify, True
        self.calls.append(item)
        self.watch.changed()
        try:
            while more:
                await self._pass_gate()
                answer = pb.VerifyAnswer(session_id=item.slice.session_id, request_id=item.slice.request_id)
                try:
                    check_lora(item.lora, self.lora_adapters)
                    self._step(open_request, answer)
                except InvalidField as error:
                    answer.status.CopyFrom(item_status(error))
                more = answer.result.more
                yield answer
                await asyncio.sleep(self.pass_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            self.watch.changed()
            raise

    def _step(self, open_request: OpenRequest[pb.VerifyItem], answer: pb.VerifyAnswer) -> None:
        _check(open_request.verify)
        if self.item_failure is not None:
            answer.status.code = self.item_failure.value[0]
            answer.status.message = "the logits are not numbers"
            return
        if open_request.tokens is None:
            admitted = self._admit(open_request.verify.slice)
            if isinstance(admitted, Miss):
                self.misses += 1
                answer.cache_miss.have, answer.cache_miss.prefix_hash = admitted.have, admitted.prefix_hash
                return
            open_request.begin(admitted)
        elif self.preemptions_left:
            self.preemptions_left -= 1
            self._preempt(open_request, answer)
            return
        self._verify(open_request, answer.result)
        self.spoil(answer.result)

    def _preempt(self, open_request: OpenRequest[pb.VerifyItem], answer: pb.VerifyAnswer) -> None:
        session_id = open_request.verify.slice.session_id
        held = self._held[session_id] = self._held[session_id][: len(self._held[session_id]) // 2]
        answer.cache_miss.have, answer.cache_miss.prefix_hash = len(held), prefix_hash(held)

    def _verify(self, open_request: OpenRequest[pb.VerifyItem], result: pb.VerifyResult) -> None:
        item, part, tokens = open_request.verify, open_request.verify.slice, open_request.tokens
        assert tokens is not None
        result.position = len(tokens)
        is_first = result.position == part.start + len(part.tokens)
        fed_from = part.start if is_first else result.position - 1
        verdict, result.verified = open_request.step()
        if item.want_features:
            end = len(tokens) - 1
            result.features_position = max(fed_from, end - MAX_FEATURE_TOKENS)
            result.features = states_of(range(result.features_position, end), item.feature_layers)
        self.confirmed[part.session_id] = len(tokens) - part.prompt_len
        held = self._held[part.session_id] = tokens[:-1]
        result.tokens.extend(verdict.tokens)
        result.accepted = verdict.accepted
        result.kv_len = len(held)
        result.fingerprint = self.fingerprint
        result.timing.compute_ns = PASS_NS
        result.more = open_request.may_go_on
        if item.HasField("logprobs"):
            result.logprobs.extend(
                logprobs_message(logprobs_of(token, item.logprobs)) for token in verdict.tokens
            )


class _TargetStream:
    def __init__(self, target: FakeTarget) -> None:
        self.answers: asyncio.Queue[pb.VerifyAnswer | _Failure | None] = asyncio.Queue()
        self._target = target
        self._items: dict[int, tuple[OpenRequest[pb.VerifyItem], asyncio.Task[None]]] = {}

    async def read(self, requests: AsyncIterator[pb.VerifyStreamRequest]) -> None:
        async for message in requests:
            for item in message.items:
                next_token = self._target.truth(item.slice)
                open_request = OpenRequest(item, item.slice, item.slice.prompt_len, next_token)
                self._items[item.slice.request_id] = (
                    open_request,
                    asyncio.create_task(self._run(open_request)),
                )
            for extension in message.extensions:
                if extension.request_id in self._items:
                    self._items[extension.request_id][0].extend(extension.limit, _hint_of(extension))
                self._target.extensions.append(extension)
                self._target.watch.changed()
            for ref in message.cancelled:
                if ref.request_id in self._items:
                    self._items.pop(ref.request_id)[1].cancel()
        self.answers.put_nowait(None)

    async def _run(self, open_request: OpenRequest[pb.VerifyItem]) -> None:
        try:
            async for answer in self._target.run(open_request):
                self.answers.put_nowait(answer)
        except _Failure as failure:
            self.answers.put_nowait(failure)
        self._items.pop(open_request.verify.slice.request_id, None)

    async def stop(self, reader: asyncio.Task[None]) -> None:
        tasks = [reader, *(task for _, task in self._items.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _hint_of(extension: pb.Extension) -> Hint | None:
    if not extension.HasField("hint"):
        return None
    hint = extension.hint
    check_token_ids("hint.draft_tokens", hint.draft_tokens, VOCAB)
    if len(hint.draft_tokens) > MAX_HINT_TOKENS:
        raise InvalidField("hint.draft_tokens", "too many")
    return Hint(hint.position, hint.prefix_hash, tuple(hint.draft_tokens), parents=tuple(hint.parents))


def _check(item: pb.VerifyItem) -> None:
    read_slice(item.slice, vocab_size=VOCAB, context_window=CONTEXT)
    check_token_ids("draft_tokens", item.draft_tokens, VOCAB)
    if len(item.draft_tokens) > MAX_DRAFT_TOKENS:
        raise InvalidField("draft_tokens", "too many")


class FakeDraft(Replica, rpc.DraftServicer):
    def __init__(self, directory: Path, tokenizer_hash: str) -> None:
        super().__init__(directory, "draft")
        self.tokenizer_hash = tokenizer_hash
        self.spoil_rate = 0.0
        self.model = "tiny-draft"
        self.strategies = STRATEGIES
        self.feature_layers: Sequence[int] = ()
        self.feature_size = STATE_SIZE
        self.version = ""
        self.max_load_bytes = 0
        self.corrupt: Callable[[pb.ProposeItem, pb.ProposeAnswer], None] = lambda _item, _answer: None
        self.before_answering: Callable[[], Any] | None = None

    def _serve(self, server: grpc.aio.Server) -> None:
        rpc.add_DraftServicer_to_server(self, server)

    async def GetDraftInfo(self, request: pb.GetDraftInfoRequest, context: Any) -> pb.GetDraftInfoResponse:
        return self.info()

    def info(self) -> pb.GetDraftInfoResponse:
        return pb.GetDraftInfoResponse(
            model=self.model,
            tokenizer_hash=self.tokenizer_hash,
            strategies=self.strategies,
            default_strategy=self.strategies[0],
            incarnation=f"draft-{self.incarnations}",
            max_draft_tokens=MAX_DRAFT_TOKENS,
            vocab_size=VOCAB,
            feature_layers=self.feature_layers,
            feature_size=self.feature_size if self.feature_layers else 0,
            version=self.version,
            max_load_bytes=self.max_load_bytes,
        )

    async def Propose(self, request: Any, context: Any) -> pb.ProposeResponse:
        raise NotImplementedError

    async def LoadDraft(self, request_iterator: object, context: Any) -> pb.LoadDraftResponse:
        raise NotImplementedError

    async def ProposeStream(
        self, request_iterator: AsyncIterator[pb.ProposeStreamRequest], context: Any
    ) -> AsyncIterator[pb.ProposeStreamResponse]:
        with self._open_stream(context):
            async for answers in self._answers(request_iterator, context):
                yield pb.ProposeStreamResponse(answers=answers)

    async def _answers(
        self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[list[Any]]:
        try:
            async for answers in respond_stream(requests, self._respond, asyncio.Event()):
                yield answers
        except _Failure as failure:
            await context.abort(failure.code, "requested by the test")

    async def _respond(self, item: pb.ProposeItem) -> AsyncGenerator[pb.ProposeAnswer]:
        yield await self._answer(item)

    async def _answer(self, item: pb.ProposeItem) -> pb.ProposeAnswer:
        await self._enter(item)
        if self.before_answering is not None:
            await self.before_answering()
        answer = pb.ProposeAnswer(session_id=item.slice.session_id, request_id=item.slice.request_id)
        tokens = self._admit(item.slice)
        if isinstance(tokens, Miss):
            answer.cache_miss.have, answer.cache_miss.prefix_hash = tokens.have, tokens.prefix_hash
        else:
            self._propose(item, tokens, answer.result)
        self.corrupt(item, answer)
        return answer

    def _propose(self, item: pb.ProposeItem, tokens: list[int], result: pb.ProposeResult) -> None:
        result.position, result.prefix_hash = len(tokens), prefix_hash(tokens)
        for _ in range(item.k):
            token = true_next(tokens, item.slice.sampling.seed)
            tokens.append((token + 1) % VOCAB if self._spoils(len(tokens)) else token)
        self._held[item.slice.session_id] = tokens
        result.draft_tokens.extend(tokens[result.position :])
        result.kv_len = len(tokens)
        result.timing.compute_ns = 500

    def _spoils(self, position: int) -> bool:
        return blake2b(position.to_bytes(4, "little"), digest_size=1).digest()[0] < 256 * self.spoil_rate
