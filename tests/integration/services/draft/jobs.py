"""Jobs for strategies, as the draft's loop makes them of a session's tokens."""

from __future__ import annotations

from galley.core.content import common_prefix_len, prefix_hash
from galley.core.grammar.compiled import CompiledGrammar
from galley.core.sampling_params import SamplingParams
from galley.core.scheduler.messages import Slice
from services.draft.strategies.base import DraftJob, DraftSession


def job_of(
    session: DraftSession,
    tokens: list[int],
    k: int,
    *,
    ahead: int = 0,
    width: int = 1,
    prompt_len: int = 1,
    salt: bytes = b"",
    workload: str = "",
    stop_token_ids: frozenset[int] = frozenset(),
    sampling: SamplingParams | None = None,
    grammar: CompiledGrammar | None = None,
) -> DraftJob:
    start = min(common_prefix_len(session.tokens, tokens), len(tokens) - 1)
    own = Slice(
        key=(salt, "s"),
        start=start,
        tokens=tokens[start:],
        prefix_hash=prefix_hash(tokens[:start]),
        prompt_len=prompt_len,
        max_position=len(tokens) + k + 1,
        sampling=sampling or SamplingParams(),
        stop_token_ids=stop_token_ids,
        min_tokens=0,
        grammar_hash=b"" if grammar is None else grammar.content_hash,
    )
    session.follow(own, ahead)
    return DraftJob(own, session, k, workload, grammar, width)
