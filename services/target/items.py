"""VerifyItem and VerifyAnswer as the engine's values, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.common.codec import logprobs_message
from services.common.pb.galley.v1 import galley_pb2 as pb
from services.common.slices import check_token_ids, read_slice
from services.core.content import Miss
from services.core.errors import GalleyError, InvalidField, Unimplemented
from services.target.engine import EngineInfo, VerifyJob

if TYPE_CHECKING:
    from services.common.batching import Done
    from services.target.engine import VerifyOutcome

# Of the likeliest tokens per position; each costs the wire 12 bytes and the log 8.
MAX_TOP_LOGPROBS = 128


def read_item(item: pb.VerifyItem, info: EngineInfo, max_draft_tokens: int) -> VerifyJob:
    """Raises InvalidField or Unimplemented, naming the field, before any work is done for the item."""
    _refuse_reserved(item)
    read = read_slice(item.slice, vocab_size=info.vocab_size, context_window=info.context_window)
    if len(item.draft_tokens) > max_draft_tokens:
        raise InvalidField(
            "draft_tokens", f"must be at most {max_draft_tokens}, are {len(item.draft_tokens)}"
        )
    check_token_ids("draft_tokens", item.draft_tokens, info.vocab_size)
    if item.logprobs > MAX_TOP_LOGPROBS:
        raise InvalidField("logprobs", f"must be <= {MAX_TOP_LOGPROBS}, is {item.logprobs}")
    return VerifyJob(
        slice=read,
        draft_tokens=tuple(item.draft_tokens),
        logprobs=item.logprobs if item.HasField("logprobs") else None,
    )


def _refuse_reserved(item: pb.VerifyItem) -> None:
    for field in ("credit", "parents", "want_features"):
        if getattr(item, field):
            raise Unimplemented(field)


def answer_of(item: pb.VerifyItem, done: Done[VerifyOutcome], fingerprint: str) -> pb.VerifyAnswer:
    """Raises the outcome if it is an error."""
    outcome = done.outcome
    if isinstance(outcome, GalleyError):
        raise outcome
    answer = pb.VerifyAnswer(session_id=item.slice.session_id, request_id=item.slice.request_id)
    if isinstance(outcome, Miss):
        answer.cache_miss.have = outcome.have
        answer.cache_miss.prefix_hash = outcome.prefix_hash
        return answer
    answer.result.CopyFrom(
        pb.VerifyResult(
            position=outcome.position,
            tokens=outcome.tokens,
            accepted=outcome.accepted,
            verified=outcome.verified,
            logprobs=[logprobs_message(entry) for entry in outcome.logprobs],
            kv_len=outcome.kv_len,
            fingerprint=fingerprint,
            timing=pb.Timing(queue_ns=done.queue_ns, compute_ns=done.compute_ns),
            batch_sessions=outcome.batch_sessions,
        )
    )
    return answer
