"""Translate between the session's events and the messages of targets and drafts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import grpc

from galley.common.logs import get_logger
from galley.common.wire.codec import grammar_message, logprobs_from, sampling_message
from galley.common.wire.status import error_type, item_error_type
from galley.core.answer.answer import SessionSpec
from galley.core.errors import Broken, InvalidField
from galley.core.features import NO_STATES, States
from galley.core.grammar.limits import FIELD as GRAMMAR_FIELD
from galley.core.names import DRAFT_SOURCES
from galley.core.session import events as ev
from galley.core.trees import main_path
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.telemetry.spans import CallSpan

ProposeEvent: TypeAlias = "ev.Proposed | ev.CacheMissed | ev.Failed"

_RETRYABLE_STATUS = frozenset(
    code.value[0]
    for code in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    )
)
"""Statuses of a single request that may succeed when repeated there; a whole stream may always."""

_INVALID = grpc.StatusCode.INVALID_ARGUMENT.value[0]

_PIECE_TOKENS = 32 * 1024
"""Tokens that a message takes up before others get a turn: about 1 ms."""

_log = get_logger(__name__)


# ---------------------------------------------------------------------------------------- requests --


async def verify_item(
    spec: SessionSpec, request: ev.Verify, remaining_ns: int | None, traceparent: str
) -> pb.VerifyItem:
    item = pb.VerifyItem(
        slice=_slice_without_tokens(spec, request.slice, remaining_ns, traceparent),
        draft_tokens=request.draft_tokens,
        survival=request.survival,
        credit=request.credit,
        hint_due=request.hint_due,
        max_verified=request.max_verified,
        logprobs=spec.logprobs,
        lora=spec.lora,
        parents=request.parents,
    )
    await _add_tokens(item.slice, request.slice.tokens)
    return item


async def propose_item(
    spec: SessionSpec,
    request: ev.Propose,
    k: int,
    remaining_ns: int | None,
    traceparent: str,
    states: States = NO_STATES,
) -> pb.ProposeItem:
    item = pb.ProposeItem(
        slice=_slice_without_tokens(spec, request.slice, remaining_ns, traceparent),
        k=k,
        strategy=request.strategy,
        workload=spec.workload,
        ahead=request.ahead,
        width=request.width if request.width > 1 else 0,
        features=states.data,
        features_position=states.position,
    )
    await _add_tokens(item.slice, request.slice.tokens)
    return item


def without_tree(item: pb.VerifyItem) -> None:
    """Keep the main path of a tree, a chain, in a request for a target that does not take trees."""
    count = len(item.draft_tokens)
    path = main_path(item.parents, count)
    item.draft_tokens[:] = [item.draft_tokens[node] for node in path]
    if item.survival:
        item.survival[:] = [item.survival[node] for node in path]
    if item.credit:  # the limit, which counts all draft tokens, stays
        item.credit += count - len(path)
    del item.parents[:]


def extension(request: ev.ExtendVerify, *, trees: bool) -> pb.Extension:
    """Return the message of an extension; without `trees`, of a tree it has the main path."""
    message = pb.Extension(limit=request.limit, hint_due=request.hint_due)
    if (hint := request.hint) is not None:
        offered = hint if trees or not hint.parents else hint.whole.main
        message.hint.position, message.hint.prefix_hash = hint.position, hint.prefix_hash
        message.hint.draft_tokens.extend(offered.draft_tokens)
        message.hint.survival.extend(offered.survival)
        message.hint.parents.extend(offered.parents)
    return message


async def _add_tokens(message: pb.SessionSlice, tokens: Sequence[int]) -> None:
    for at in range(0, len(tokens), _PIECE_TOKENS):
        message.tokens.extend(tokens[at : at + _PIECE_TOKENS])
        if len(tokens) > _PIECE_TOKENS:
            await asyncio.sleep(0)


def _slice_without_tokens(
    spec: SessionSpec, part: ev.Slice, remaining_ns: int | None, traceparent: str
) -> pb.SessionSlice:
    grammar = spec.grammar
    return pb.SessionSlice(
        session_id=spec.session_id,
        start=part.start,
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
        structured_output=None if grammar is None or part.start else grammar_message(grammar),
        grammar_hash=b"" if grammar is None else grammar.content_hash,
    )


# --------------------------------------------------------------------------------------- responses --


def has_more(answer: pb.VerifyAnswer) -> bool:
    """Return True if the target will send further responses to the same request."""
    return answer.HasField("result") and answer.result.more


def verify_event(request_id: int, answer: pb.VerifyAnswer, *, trees: bool = True) -> ev.VerifyEvent:
    """Return the event of a response of a target that takes `trees`, or chains alone."""
    if not answer.HasField("result"):
        return _other_event(request_id, answer)
    result = answer.result
    # Made for each verdict, and in half the time without the names.
    return ev.Verified(
        request_id,
        result.position,
        tuple(result.tokens[:]),
        result.accepted,
        result.verified,
        result.kv_len,
        result.fingerprint,
        tuple([logprobs_from(entry) for entry in result.logprobs[:]]),
        _timing(result.timing),
        result.more,
        result.batch_sessions or 1,
        result.row_ns,
        result.prefill_ns,
        result.plain_ns,
        result.kv_reused,
        result.batch_span,
        trees,
    )


def propose_event(
    request: ev.Propose, answer: pb.ProposeAnswer, info: pb.GetDraftInfoResponse
) -> ProposeEvent:
    if answer.WhichOneof("outcome") != "result":
        other = _other_event(request.request_id, answer)
        # The draft does not take such a session.
        if isinstance(other, ev.Failed) and answer.status.code == _INVALID:
            return replace(other, refusal=InvalidField(*_parted(answer.status.message)))
        return other
    result = answer.result
    strategy = request.strategy or info.default_strategy
    return ev.Proposed(
        request_id=request.request_id,
        position=result.position,
        prefix_hash=result.prefix_hash,
        tokens=tuple(result.draft_tokens),
        cache_len=result.kv_len,
        timing=_timing(result.timing),
        survival=tuple(result.survival),
        sessions=max(1, result.batch_sessions),
        max_tokens=info.max_draft_tokens,
        strategy=strategy,
        sources=_sources(result, strategy),
        parents=tuple(result.parents),
        used_features=result.used_features,
    )


def _sources(result: pb.ProposeResult, strategy: str) -> tuple[str, ...]:
    """Return what proposed each token, as far as a draft that is not trusted says it; else the strategy."""
    sources: list[str] = []
    for run in result.sources:
        name = run.name if run.name in DRAFT_SOURCES else strategy
        sources += [name] * min(run.tokens, len(result.draft_tokens) - len(sources))
    return tuple(sources)


def failed_event(request_id: int, error: Exception, span: CallSpan) -> ev.Failed:
    """Return the event of a request whose stream broke, and set the status of its span."""
    if isinstance(error, grpc.aio.AioRpcError):
        span.failed(error.code().name.lower())
    else:
        span.failed(error_type(error))
    return ev.Failed(request_id, problem_of(error))


def problem_of(error: Exception) -> str:
    """Return what an error of a request says, in one line."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error)


def broken_event(request_id: int, error: Exception) -> ev.Failed:
    """Log an unexpected error of the gateway, and return the event that ends its session."""
    _log.error("target request failed", exc_info=error)
    message = f"its request raised {type(error).__name__}"
    return ev.Failed(request_id, message, retryable=False, refusal=Broken(message))


def note_status(span: CallSpan, answer: pb.VerifyAnswer | pb.ProposeAnswer) -> None:
    if answer.HasField("status"):
        span.failed(item_error_type(answer.status))


def _timing(timing: pb.Timing) -> ev.Timing:
    return ev.Timing(timing.queue_ns, timing.compute_ns, timing.linger_ns)


def _other_event(request_id: int, answer: pb.VerifyAnswer | pb.ProposeAnswer) -> ev.CacheMissed | ev.Failed:
    match answer.WhichOneof("outcome"):
        case "cache_miss":
            return ev.CacheMissed(request_id, answer.cache_miss.have, answer.cache_miss.prefix_hash)
        case "status":
            status = answer.status
            return ev.Failed(
                request_id,
                status.message,
                retryable=status.code in _RETRYABLE_STATUS,
                refusal=_refusal(status),
            )
        case "superseded":
            return ev.Failed(request_id, "a newer request of the session superseded it")
        case outcome:
            return ev.Failed(request_id, f"unknown outcome {outcome}")


def _refusal(status: pb.ItemStatus) -> InvalidField | None:
    """Return the error of a grammar that led nowhere, the only fault of a caller that a replica finds."""
    field, problem = _parted(status.message)
    is_grammar = status.code == _INVALID and field.split(".")[0] == GRAMMAR_FIELD
    return InvalidField(field, problem) if is_grammar else None


def _parted(message: str) -> tuple[str, str]:
    """Return the field and the problem that the message of an InvalidField names."""
    field, _, problem = message.partition(": ")
    return field, problem
