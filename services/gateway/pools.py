"""The draft and target pools over gRPC: the real ports of the runner.

What fails comes back as `Failed`; only cancellation passes through.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import grpc

from services.common.codec import logprobs_from, sampling_message
from services.common.logs import get_logger
from services.common.pb.galley.v1 import galley_pb2 as pb
from services.common.pb.galley.v1 import galley_pb2_grpc as rpc
from services.common.telemetry import traceparent
from services.core import events as ev
from services.core.errors import TokenizerMismatch
from services.core.ports import Replica

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.core.answer import SessionSpec

_SECOND = 1_000_000_000
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
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
    }
)
"""Of a whole call: anything else may be the connection's fault."""

_log = get_logger(__name__)

_Answer = TypeVar("_Answer", pb.VerifyAnswer, pb.ProposeAnswer)


class TargetPool:
    """One target address; `info` is what it said of itself when it was met."""

    def __init__(self, channel: grpc.aio.Channel, address: str, info: pb.GetTargetInfoResponse) -> None:
        self._stub = rpc.TargetStub(channel)
        self.info = info
        self.replica = Replica(address, info.incarnation)

    @classmethod
    async def meet(cls, channel: grpc.aio.Channel, address: str, timeout_s: float) -> TargetPool:
        """Wait for the target to serve; raises grpc.aio.AioRpcError if it does not in time."""
        stub = rpc.TargetStub(channel)
        info = await stub.GetTargetInfo(pb.GetTargetInfoRequest(), timeout=timeout_s, wait_for_ready=True)
        return cls(channel, address, info)

    async def verify(
        self, spec: SessionSpec, request: ev.Verify, remaining_ns: int | None
    ) -> ev.Verified | ev.CacheMissed | ev.Failed:
        """See `services.core.ports.TargetPort`."""
        item = pb.VerifyItem(
            slice=_slice(spec, request.request_id, request.slice, remaining_ns),
            draft_tokens=request.draft_tokens,
            logprobs=spec.logprobs,
        )
        try:
            response = await self._stub.Verify(pb.VerifyRequest(items=[item]), timeout=_seconds(remaining_ns))
        except grpc.aio.AioRpcError as error:
            return _failed(request.request_id, error)
        answer = _only_answer(response.answers, request.request_id)
        if answer is None:
            return ev.Failed(request.request_id, "the target answered something else")
        if answer.WhichOneof("outcome") == "result":
            return _verified(request.request_id, answer.result)
        return _other(request.request_id, answer)


class DraftPool:
    """One draft address, used only while its tokenizer is known to be the target's."""

    def __init__(self, channel: grpc.aio.Channel, address: str, target_tokenizer_hash: str) -> None:
        self._stub = rpc.DraftStub(channel)
        self._address = address
        self._tokenizer_hash = target_tokenizer_hash
        self.info: pb.GetDraftInfoResponse | None = None

    @property
    def replica(self) -> Replica | None:
        """Who answers; None while the pairing is unproven."""
        return None if self.info is None else Replica(self._address, self.info.incarnation)

    async def pair(self, timeout_s: float) -> pb.GetDraftInfoResponse:
        """Ask the draft who it is. Raises TokenizerMismatch, or grpc.aio.AioRpcError if it is away."""
        info = await self._stub.GetDraftInfo(pb.GetDraftInfoRequest(), timeout=timeout_s)
        if info.tokenizer_hash != self._tokenizer_hash:
            raise TokenizerMismatch(info.tokenizer_hash, self._tokenizer_hash)
        self.info = info
        return info

    async def propose(
        self, spec: SessionSpec, request: ev.Propose, remaining_ns: int | None
    ) -> ev.Proposed | ev.CacheMissed | ev.Failed:
        """See `services.core.ports.DraftPort`."""
        try:
            if self.info is None:
                await self.pair(_seconds(remaining_ns) or 1.0)
            return await self._ask(spec, request, remaining_ns)
        except TokenizerMismatch as error:
            _log.error("draft refused", reason=str(error))
            return ev.Failed(request.request_id, str(error))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self.info = None  # another process may come back at this address
            return _failed(request.request_id, error)

    async def _ask(
        self, spec: SessionSpec, request: ev.Propose, remaining_ns: int | None
    ) -> ev.Proposed | ev.CacheMissed | ev.Failed:
        item = pb.ProposeItem(
            slice=_slice(spec, request.request_id, request.slice, remaining_ns),
            k=request.k,
            strategy=request.strategy,
            workload=spec.workload,
        )
        response = await self._stub.Propose(pb.ProposeRequest(items=[item]), timeout=_seconds(remaining_ns))
        answer = _only_answer(response.answers, request.request_id)
        if answer is None:
            return ev.Failed(request.request_id, "the draft answered something else")
        if answer.WhichOneof("outcome") == "result":
            return _proposed(request.request_id, answer.result)
        return _other(request.request_id, answer)


class NoDraft:
    """The draft of a gateway that has none."""

    info = None
    replica = None

    async def propose(self, _spec: SessionSpec, request: ev.Propose, _remaining_ns: int | None) -> ev.Failed:
        """Always nothing."""
        return ev.Failed(request.request_id, "this gateway has no draft")


def _slice(spec: SessionSpec, request_id: int, part: ev.Slice, remaining_ns: int | None) -> pb.SessionSlice:
    return pb.SessionSlice(
        session_id=spec.session_id,
        request_id=request_id,
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
        traceparent=traceparent(),
    )


def _seconds(remaining_ns: int | None) -> float | None:
    return None if remaining_ns is None else remaining_ns / _SECOND


def _only_answer(answers: Sequence[_Answer], request_id: int) -> _Answer | None:
    if len(answers) == 1 and answers[0].request_id == request_id:
        return answers[0]
    return None


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
    )


def _proposed(request_id: int, result: pb.ProposeResult) -> ev.Proposed:
    return ev.Proposed(
        request_id=request_id,
        position=result.position,
        prefix_hash=result.prefix_hash,
        tokens=tuple(result.draft_tokens),
        cache_len=result.kv_len,
        timing=_timing(result.timing),
    )


def _timing(timing: pb.Timing) -> ev.Timing:
    return ev.Timing(timing.queue_ns, timing.compute_ns)


def _other(request_id: int, answer: pb.VerifyAnswer | pb.ProposeAnswer) -> ev.CacheMissed | ev.Failed:
    match answer.WhichOneof("outcome"):
        case "cache_miss":
            return ev.CacheMissed(request_id, answer.cache_miss.have, answer.cache_miss.prefix_hash)
        case "status":
            status = answer.status
            return ev.Failed(request_id, status.message, retryable=status.code in _RETRYABLE_ITEM)
        case outcome:
            return ev.Failed(request_id, f"answered {outcome}")


def _failed(request_id: int, error: grpc.aio.AioRpcError) -> ev.Failed:
    message = f"{error.code().name}: {error.details()}"
    return ev.Failed(request_id, message, retryable=error.code() not in _HOPELESS_CALL)
