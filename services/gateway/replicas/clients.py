"""The draft and target pools over gRPC: the real ports of the runner.

What fails comes back as `Failed`; only cancellation passes through.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import TypeAlias

import grpc

from galley.common.tls.channels import generation_of
from galley.common.wire.codec import logprobs_from, sampling_message
from galley.common.wire.status import error_type, item_error_type
from galley.core import names
from galley.core.answer.answer import SessionSpec
from galley.core.errors import TokenizerMismatch, Unavailable
from galley.core.session import events as ev
from galley.core.session.ports import Replica
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from services.gateway.replicas.request_stream import OpenRequest, RequestStream
from services.gateway.session.timeouts import SECOND
from services.gateway.telemetry.observer import request_observer
from services.gateway.telemetry.spans import CallSpan

Verdict: TypeAlias = "ev.Verified | ev.CacheMissed | ev.Failed"

_RETRYABLE_ITEM = frozenset(
    code.value[0]
    for code in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    )
)
"""Of one item in a batch: anything else would only fail again."""

_HOPELESS_CALL = frozenset(
    {
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
    }
)
"""Of a whole stream: anything else may be the connection's fault, or that of an item beside this one."""

MEET_TIMEOUT_S = 1.0


class TargetPool:
    """One target address; `info` is what it said of itself when it was last met."""

    def __init__(self, channel: grpc.aio.Channel, address: str, came_back: Callable[[], None]) -> None:
        """`came_back` is called when an item found out who serves there now."""
        self._stub = rpc.TargetStub(channel)
        self.address = address
        self._came_back = came_back
        self._items: RequestStream[pb.VerifyItem, pb.VerifyAnswer] = RequestStream(
            self._stub.VerifyStream, _verify_request, _has_more, generation_of(channel)
        )
        self.info = pb.GetTargetInfoResponse()
        self._met = False
        self._closed = 0

    @property
    def replica(self) -> Replica | None:
        """Who answers; None while nobody does."""
        return Replica(self.address, self.info.incarnation) if self._met else None

    @property
    def outdated(self) -> bool:
        """Whether it is to be met over a new connection, where items then go."""
        return self._items.is_outdated

    async def meet(self, timeout_s: float, *, wait: bool = False) -> None:
        """Ask the target who it is; `wait` until it serves.

        Raises grpc.aio.AioRpcError if it does not answer in time, TokenizerMismatch if it is another than
        was met before.
        """
        request, outdated = pb.GetTargetInfoRequest(), self._items.is_outdated
        info = await self._stub.GetTargetInfo(request, timeout=timeout_s, wait_for_ready=wait)
        if self.info.tokenizer_hash not in {"", info.tokenizer_hash}:
            raise TokenizerMismatch(info.tokenizer_hash, self.info.tokenizer_hash, "new target")
        if self.info.vocab_size not in {0, info.vocab_size}:
            raise Unavailable(
                f"another model has come: vocabulary {info.vocab_size}, was {self.info.vocab_size}"
            )
        if outdated and self._items.is_outdated:  # nobody else met it meanwhile
            self._items.reconnect()
        self.info = info
        self._met = True

    def verify(self, spec: SessionSpec, request: ev.Verify, remaining_ns: int | None) -> PoolVerification:
        """See `galley.core.session.ports.TargetPort`."""
        return PoolVerification(self, spec, request, remaining_ns)

    async def open(self, item: pb.VerifyItem) -> OpenRequest[pb.VerifyAnswer]:
        """Send an item once it is known who serves.

        Raises what `meet` does, and Unavailable if the pool was closed meanwhile.
        """
        if self._items.is_broken:
            self.lost()  # though no item was open to notice
        if not self._met or self._items.is_outdated:
            # However long the item may take: who does not say who it is keeps nobody from asking another.
            closed = self._closed
            await self.meet(min(_seconds(item.slice.remaining_ns) or MEET_TIMEOUT_S, MEET_TIMEOUT_S))
            if self._closed != closed:  # nobody would end a stream that is opened now
                raise Unavailable(f"the target at {self.address} was let go")
            self._came_back()
        return self._items.open(item)

    def lost(self) -> None:
        """The stream broke: another process may come back at this address."""
        self._met = False

    async def close(self) -> None:
        """End the stream, and open none for an item that waits to be sent; a later one may be sent again."""
        self._closed += 1
        await self._items.close()


class _GivenUp(Exception):
    """Somebody else will be asked, or has answered: `kind` is the status that this comes to."""

    def __init__(self, why: str, kind: str) -> None:
        super().__init__(why)
        self.kind = kind


class PoolVerification:
    """An item of a TargetPool; see `galley.core.session.ports.Verification`."""

    def __init__(
        self, pool: TargetPool, spec: SessionSpec, request: ev.Verify, remaining_ns: int | None
    ) -> None:
        self._pool = pool
        self._request_id = request.request_id
        self._call = request_observer().call(names.VERIFY, pool.address)
        self._item = pb.VerifyItem(
            slice=_slice(spec, request.slice, remaining_ns, self._call.traceparent),
            draft_tokens=request.draft_tokens,
            survival=request.survival,
            credit=request.credit,
            hint_due=request.hint_due,
            max_verified=request.max_verified,
            logprobs=spec.logprobs,
        )
        self._opened: OpenRequest[pb.VerifyAnswer] | None = None
        self._replica: Replica | None = None
        self._early: list[pb.Extension] = []
        self._answers = self._run()

    @property
    def replica(self) -> Replica | None:
        """Who answers: who served when the item was sent, whoever has come to the address since."""
        return self._replica or self._pool.replica

    @property
    def is_open(self) -> bool:
        """Whether it has been sent."""
        return self._opened is not None

    @property
    def has_answer(self) -> bool:
        """Whether one has come that is yet to be read."""
        return self._opened is not None and self._opened.has_response

    def give_up(self, why: str, kind: str) -> None:
        """What is awaited of an open item comes to nothing; no more than that is held against the replica.

        `kind` is the status that it comes to, in lower case.
        """
        if self._opened is not None:
            self._opened.fail(_GivenUp(why, kind))

    def __aiter__(self) -> AsyncIterator[Verdict]:
        return self._answers

    def extend(self, request: ev.ExtendVerify) -> None:
        """Send it after the item."""
        if self._opened is None:
            self._early.append(_extension(request))
        else:
            self._opened.extend(_extension(request))

    async def aclose(self) -> None:
        """Give the item up, if it is open."""
        await self._answers.aclose()
        self._call.end()

    async def _run(self) -> AsyncGenerator[Verdict, None]:
        try:
            opened = self._opened = await self._pool.open(self._item)
            self._replica = self._pool.replica
            for extension in self._early:
                opened.extend(extension)
            try:
                more = True
                while more:
                    answer = await opened.next_response()
                    more = _has_more(answer)
                    _note_status(self._call, answer)
                    yield _verdict(self._request_id, answer)
            finally:
                opened.cancel()
        except (_GivenUp, TokenizerMismatch) as error:
            self._call.failed(error.kind if isinstance(error, _GivenUp) else error_type(error))
            yield ev.Failed(self._request_id, str(error))
        except (grpc.aio.AioRpcError, Unavailable) as error:
            self._pool.lost()
            self._call.failed(_kind_of(error))
            yield _failed(self._request_id, error)


class DraftPool:
    """One draft address; `info` is what it said of itself when it was last met."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self._stub = rpc.DraftStub(channel)
        self._address = address
        self._items: RequestStream[pb.ProposeItem, pb.ProposeAnswer] = RequestStream(
            self._stub.ProposeStream, _propose_request, generation=generation_of(channel)
        )
        self.info = pb.GetDraftInfoResponse()
        self._met = False

    @property
    def replica(self) -> Replica | None:
        """Who answers; None while nobody does."""
        there = self._met and not self._items.is_broken
        return Replica(self._address, self.info.incarnation) if there else None

    @property
    def outdated(self) -> bool:
        """Whether it is to be met over a new connection, where items then go."""
        return self._items.is_outdated

    async def meet(self, timeout_s: float) -> None:
        """Ask the draft who it is. Raises grpc.aio.AioRpcError if it does not answer in time."""
        outdated = self._items.is_outdated
        self.info = await self._stub.GetDraftInfo(pb.GetDraftInfoRequest(), timeout=timeout_s)
        if self._items.is_broken or (outdated and self._items.is_outdated):
            self._items.reconnect()
        self._met = True

    async def propose(
        self, spec: SessionSpec, request: ev.Propose, remaining_ns: int | None
    ) -> ev.Proposed | ev.CacheMissed | ev.Failed:
        """See `galley.core.session.ports.DraftPort`."""
        if self.replica is None:  # what comes next at this address may have another tokenizer
            return ev.Failed(request.request_id, f"the draft at {self._address} is away")
        call = request_observer().call(names.PROPOSE, self._address)
        item = pb.ProposeItem(
            slice=_slice(spec, request.slice, remaining_ns, call.traceparent),
            k=min(request.k, self.info.max_draft_tokens),
            strategy=request.strategy,
            workload=spec.workload,
            ahead=request.ahead,
        )
        began_s = asyncio.get_running_loop().time()
        try:
            answer = await self._items.send(item)
        except asyncio.CancelledError:
            within_s = _seconds(remaining_ns)
            if within_s is not None and asyncio.get_running_loop().time() - began_s >= within_s:
                call.failed("deadline_exceeded")  # else it is not wanted any more
            raise
        except (grpc.aio.AioRpcError, Unavailable) as error:
            self.lost()
            call.failed(_kind_of(error))
            return _failed(request.request_id, error)
        else:
            _note_status(call, answer)
        finally:
            call.end()
        if answer.WhichOneof("outcome") == "result":
            return self._proposed(request, answer.result)
        return _other(request.request_id, answer)

    def _proposed(self, request: ev.Propose, result: pb.ProposeResult) -> ev.Proposed:
        return ev.Proposed(
            request_id=request.request_id,
            position=result.position,
            prefix_hash=result.prefix_hash,
            tokens=tuple(result.draft_tokens),
            cache_len=result.kv_len,
            timing=_timing(result.timing),
            survival=tuple(result.survival),
            sessions=max(1, result.batch_sessions),
            max_tokens=self.info.max_draft_tokens,
            strategy=request.strategy or self.info.default_strategy,
        )

    def lost(self) -> None:
        """It failed: another process may come back at this address."""
        self._met = False

    async def close(self) -> None:
        """End the stream; the items that are open fail."""
        self.lost()
        await self._items.close()


def _slice(spec: SessionSpec, part: ev.Slice, remaining_ns: int | None, traceparent: str) -> pb.SessionSlice:
    return pb.SessionSlice(
        session_id=spec.session_id,
        start=part.start,
        tokens=part.tokens,
        prefix_hash=part.prefix_hash,
        prompt_len=len(spec.prompt),
        max_position=spec.max_position,
        sampling=sampling_message(spec.sampling),
        stop_token_ids=sorted(spec.stop_token_ids),
        min_tokens=spec.min_tokens,
        remaining_ns=remaining_ns or 0,
        arrival_ns=spec.arrival_ns,
        priority=spec.priority,
        tenant_salt=spec.tenant_salt,
        traceparent=traceparent,
    )


def _seconds(remaining_ns: int | None) -> float | None:
    return None if remaining_ns is None else remaining_ns / SECOND


def _verify_request(
    items: list[pb.VerifyItem], given_up: list[pb.ItemRef], extensions: list[pb.Extension]
) -> pb.VerifyStreamRequest:
    return pb.VerifyStreamRequest(items=items, cancelled=given_up, extensions=extensions)


def _has_more(answer: pb.VerifyAnswer) -> bool:
    return answer.HasField("result") and answer.result.more


def _extension(request: ev.ExtendVerify) -> pb.Extension:
    """Without the names of its item, which the stream gives."""
    extension = pb.Extension(limit=request.limit, hint_due=request.hint_due)
    if (hint := request.hint) is not None:
        extension.hint.position, extension.hint.prefix_hash = hint.position, hint.prefix_hash
        extension.hint.draft_tokens.extend(hint.draft_tokens)
        extension.hint.survival.extend(hint.survival)
    return extension


def _propose_request(
    items: list[pb.ProposeItem], given_up: list[pb.ItemRef], _extensions: list[pb.Extension]
) -> pb.ProposeStreamRequest:
    return pb.ProposeStreamRequest(items=items, cancelled=given_up)


def _verdict(request_id: int, answer: pb.VerifyAnswer) -> Verdict:
    if answer.WhichOneof("outcome") == "result":
        return _verified(request_id, answer.result)
    return _other(request_id, answer)


def _verified(request_id: int, result: pb.VerifyResult) -> ev.Verified:
    return ev.Verified(
        request_id=request_id,
        position=result.position,
        tokens=tuple(result.tokens),
        accepted=result.accepted,
        verified=result.verified,
        cache_len=result.kv_len,
        fingerprint=result.fingerprint,
        logprobs=tuple(logprobs_from(entry) for entry in result.logprobs),
        timing=_timing(result.timing),
        more=result.more,
        sessions=max(1, result.batch_sessions),
        row_ns=result.row_ns,
        prefill_ns=result.prefill_ns,
        plain_ns=result.plain_ns,
        batch_rows=result.batch_rows,
        kv_reused=result.kv_reused,
        batch_span=result.batch_span,
    )


def _timing(timing: pb.Timing) -> ev.Timing:
    return ev.Timing(timing.queue_ns, timing.compute_ns, timing.linger_ns)


def _other(request_id: int, answer: pb.VerifyAnswer | pb.ProposeAnswer) -> ev.CacheMissed | ev.Failed:
    match answer.WhichOneof("outcome"):
        case "cache_miss":
            return ev.CacheMissed(request_id, answer.cache_miss.have, answer.cache_miss.prefix_hash)
        case "status":
            status = answer.status
            return ev.Failed(request_id, status.message, retryable=status.code in _RETRYABLE_ITEM)
        case outcome:
            return ev.Failed(request_id, f"answered {outcome}")


def _failed(request_id: int, error: grpc.aio.AioRpcError | Unavailable) -> ev.Failed:
    if isinstance(error, Unavailable):
        return ev.Failed(request_id, str(error))
    message = f"{error.code().name}: {error.details()}"
    return ev.Failed(request_id, message, retryable=error.code() not in _HOPELESS_CALL)


def _note_status(call: CallSpan, answer: pb.VerifyAnswer | pb.ProposeAnswer) -> None:
    """A miss is no failure: it is what a cache says."""
    if answer.HasField("status"):
        call.failed(item_error_type(answer.status))


def _kind_of(error: grpc.aio.AioRpcError | Unavailable) -> str:
    return error_type(error) if isinstance(error, Unavailable) else error.code().name.lower()
