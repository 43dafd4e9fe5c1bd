"""Jobs for strategies, as the draft's loop makes them of a session's tokens."""

from __future__ import annotations

from galley.core.content import common_prefix_len, prefix_hash
from galley.core.sampling_params import SamplingParams
from galley.core.scheduler.messages import Slice
from services.draft.strategies.base import DraftJob, DraftSession


def job_of(
    session: DraftSession,
    tokens: list[int],
    k: int,
    *,
    ahead: int = 0,
    prompt_len: int = 1,
    salt: bytes = b"",
    workload: str = "",
    stop_token_ids: frozenset[int] = frozenset(),
) -> DraftJob:
    start = min(common_prefix_len(session.tokens, tokens), len(tokens) - 1)
    own = Slice(
        key=(salt, "s"),
        start=start,
        tokens=tokens[start:],
        prefix_hash=prefix_hash(tokens[:start]),
        prompt_len=prompt_len,
        max_position=len(tokens) + k + 1,
        sampling=SamplingParams(),
        stop_token_ids=stop_token_ids,
        min_tokens=0,
    )
    session.tokens[start:] = own.tokens
    session.confirmed = len(tokens) - ahead
    return DraftJob(own, session, k, workload)
