"""Convert ProposeItem and ProposeAnswer into values of the drafter, and back."""

from __future__ import annotations

from dataclasses import dataclass

from galley.common.wire.codec import read_slice
from galley.core.content import Miss
from galley.core.errors import GalleyError, InvalidField, Unimplemented
from galley.core.scheduler.messages import Superseded
from galley.pb.galley.v1 import galley_pb2 as pb
from services.draft.drafter import Done, ProposeJob

# A draft without a model accepts every token id and length of the wire.
ANY_VOCABULARY = 2**32
_ANY_LENGTH = 2**32
MAX_WORKLOAD_BYTES = 256


@dataclass(frozen=True, slots=True)
class DraftInfo:
    """The description of a draft; `vocab_size` is 0 without a model."""

    model: str
    tokenizer_hash: str
    strategies: tuple[str, ...]
    default_strategy: str
    max_draft_tokens: int
    vocab_size: int


def read_item(item: pb.ProposeItem, info: DraftInfo) -> ProposeJob:
    """Return the validated request. Raises InvalidField or Unimplemented, which name the field."""
    if item.features:
        raise Unimplemented("features")
    read = read_slice(item.slice, vocab_size=info.vocab_size or ANY_VOCABULARY, context_window=_ANY_LENGTH)
    if item.k > info.max_draft_tokens:
        raise InvalidField("k", f"must be <= {info.max_draft_tokens}, got {item.k}")
    if len(item.workload.encode()) > MAX_WORKLOAD_BYTES:
        raise InvalidField(
            "workload", f"must be at most {MAX_WORKLOAD_BYTES} bytes, got {len(item.workload.encode())}"
        )
    strategy = item.strategy or info.default_strategy
    if strategy not in info.strategies:
        raise InvalidField("strategy", f"must be one of {', '.join(info.strategies)}, got {strategy!r}")
    if item.ahead >= read.position:
        raise InvalidField("ahead", f"must be < {read.position} (all tokens), got {item.ahead}")
    return ProposeJob(read, item.k, strategy, item.ahead, item.workload)


def answer_of(item: pb.ProposeItem, done: Done) -> pb.ProposeAnswer:
    """Return the response to `item`. Raises the outcome if it is an error."""
    outcome = done.outcome
    if isinstance(outcome, GalleyError):
        raise outcome
    answer = pb.ProposeAnswer(session_id=item.slice.session_id, request_id=item.slice.request_id)
    if isinstance(outcome, Miss):
        answer.cache_miss.have = outcome.have
        answer.cache_miss.prefix_hash = outcome.prefix_hash
        return answer
    if isinstance(outcome, Superseded):
        answer.superseded.position = outcome.position
        answer.superseded.prefix_hash = outcome.prefix_hash
        return answer
    answer.result.CopyFrom(
        pb.ProposeResult(
            position=outcome.position,
            prefix_hash=outcome.prefix_hash,
            draft_tokens=outcome.draft_tokens,
            survival=outcome.survival,
            kv_len=outcome.kv_len,
            timing=pb.Timing(queue_ns=done.queue_ns, compute_ns=done.compute_ns),
            batch_sessions=done.sessions,
        )
    )
    return answer
