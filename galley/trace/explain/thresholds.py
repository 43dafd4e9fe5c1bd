"""The thresholds that choose between explanations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The thresholds of the rules in `galley.trace.explain.causes`."""

    # A round is slow from this multiple of the median on; fewer other rounds give no median.
    slow: float = 1.5
    few_rounds: int = 3
    # The least share of the lost time that a cause must account for.
    share: float = 0.5
    # A cache that lacks fewer tokens than one KV block is not cold.
    cold_tokens: int = 32
    # Prompts of other sessions make a step slow from this share of its rows on.
    prefill_share: float = 0.25
    # A step is full from this number of sessions on.
    full_sessions: int = 4
    # A rank holds up a step if it takes this multiple of the others' median.
    rank_skew: float = 1.5


THRESHOLDS = Thresholds()
