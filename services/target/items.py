"""Convert wire messages to the scheduler's values, and results to responses."""

from __future__ import annotations

from collections.abc import Sequence

from galley.common.wire.codec import check_token_ids, logprobs_message, read_slice
from galley.core.content import HASH_BYTES, Miss
from galley.core.errors import GalleyError, InvalidField, Unimplemented
from galley.core.hints import MAX_HINT_TOKENS, Hint
from galley.core.scheduler.messages import Confirmed, Extend, Outcome, Superseded, VerifyRequest
from galley.pb.galley.v1 import galley_pb2 as pb
from services.target.engine.protocol import EngineInfo

# Likeliest tokens listed a position; each takes 12 bytes on the wire and 8 in the log.
MAX_TOP_LOGPROBS = 128


def read_item(
    item: pb.VerifyItem, info: EngineInfo, max_draft_tokens: int, *, now_ns: int, epoch_ns: int
) -> VerifyRequest:
    """Return the request of an item. Raises InvalidField or Unimplemented, naming the field, before any work.

    `now_ns` is the scheduler's time; `epoch_ns` the time of day, used for a session without arrival time.
    """
    _refuse_reserved(item)
    read = read_slice(item.slice, vocab_size=info.vocab_size, context_window=info.context_window)
    _check_draft("", item.draft_tokens, item.survival, info.vocab_size, max_draft_tokens)
    if item.logprobs > MAX_TOP_LOGPROBS:
        raise InvalidField("logprobs", f"must be <= {MAX_TOP_LOGPROBS}, got {item.logprobs}")
    return VerifyRequest(
        key=read.key,
        start=read.start,
        tokens=read.tokens,
        prefix_hash=read.prefix_hash,
        prompt_len=read.prompt_len,
        max_position=read.max_position,
        sampling=read.sampling,
        stop_token_ids=read.stop_token_ids,
        min_tokens=read.min_tokens,
        draft_tokens=tuple(item.draft_tokens),
        survival=tuple(item.survival),
        credit=item.credit,
        hint_due=item.hint_due,
        max_verified=item.max_verified,
        logprobs=item.logprobs if item.HasField("logprobs") else None,
        arrival_ns=item.slice.arrival_ns or epoch_ns,
        priority=item.slice.priority,
        deadline_ns=now_ns + item.slice.remaining_ns if item.slice.remaining_ns else None,
    )


def read_extension(message: pb.Extension, info: EngineInfo) -> Extend:
    """Return an extension's values. Raises InvalidField, naming the field."""
    hint = None
    if message.HasField("hint"):
        sent = message.hint
        _check_draft("hint.", sent.draft_tokens, sent.survival, info.vocab_size, MAX_HINT_TOKENS)
        if len(sent.prefix_hash) != HASH_BYTES:
            raise InvalidField(
                "hint.prefix_hash", f"must have {HASH_BYTES} bytes, got {len(sent.prefix_hash)}"
            )
        hint = Hint(sent.position, sent.prefix_hash, tuple(sent.draft_tokens), tuple(sent.survival))
    return Extend(limit=message.limit, hint=hint, hint_due=message.hint_due)


def _refuse_reserved(item: pb.VerifyItem) -> None:
    for field in ("parents", "want_features"):
        if getattr(item, field):
            raise Unimplemented(field)


def _check_draft(
    prefix: str, draft_tokens: Sequence[int], survival: Sequence[float], vocab_size: int, max_tokens: int
) -> None:
    if len(draft_tokens) > max_tokens:
        raise InvalidField(f"{prefix}draft_tokens", f"must be at most {max_tokens}, got {len(draft_tokens)}")
    check_token_ids(f"{prefix}draft_tokens", draft_tokens, vocab_size)
    if survival and len(survival) != len(draft_tokens):
        raise InvalidField(f"{prefix}survival", f"must be empty or {len(draft_tokens)}, got {len(survival)}")
    for index, chance in enumerate(survival):
        if not 0.0 <= chance <= 1.0:
            raise InvalidField(f"{prefix}survival[{index}]", f"must be in [0, 1], got {chance:g}")


def answer_of(item: pb.VerifyItem, outcome: Outcome, fingerprint: str) -> pb.VerifyAnswer:
    """Return the response to `item` with this outcome. Raises the outcome if it is an error."""
    if isinstance(outcome, GalleyError):
        raise outcome
    answer = pb.VerifyAnswer(session_id=item.slice.session_id, request_id=item.slice.request_id)
    if isinstance(outcome, Miss):
        answer.cache_miss.have = outcome.have
        answer.cache_miss.prefix_hash = outcome.prefix_hash
    elif isinstance(outcome, Superseded):
        answer.superseded.position = outcome.position
        answer.superseded.prefix_hash = outcome.prefix_hash
    else:
        answer.result.CopyFrom(_result_of(outcome, fingerprint))
    return answer


def _result_of(outcome: Confirmed, fingerprint: str) -> pb.VerifyResult:
    return pb.VerifyResult(
        position=outcome.position,
        tokens=outcome.tokens,
        accepted=outcome.accepted,
        verified=outcome.verified,
        logprobs=[logprobs_message(entry) for entry in outcome.logprobs],
        kv_len=outcome.kv_len,
        fingerprint=fingerprint,
        timing=pb.Timing(
            queue_ns=outcome.queue_ns, compute_ns=outcome.compute_ns, linger_ns=outcome.linger_ns
        ),
        batch_sessions=outcome.batch_sessions,
        more=outcome.more,
        row_ns=outcome.row_ns,
        prefill_ns=outcome.prefill_ns,
        plain_ns=outcome.plain_ns,
        batch_rows=outcome.batch_rows,
        kv_reused=outcome.kv_reused,
        batch_span=outcome.batch_span,
    )
