"""Where one explanation gives way to another: every number that decides, in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Of `galley.trace.explain.causes`."""

    # From how many times the median on a round is called slow; with fewer other rounds there is no median.
    slow: float = 1.5
    few_rounds: int = 3
    # What a cause must account for, of the time that is to be explained.
    share: float = 0.5
    # A target that lacked fewer tokens than a KV block of its cache was not cold.
    cold_tokens: int = 32
    # From which share on prompts of others made a pass slow.
    prefill_share: float = 0.25
    # From how many sessions on a pass was full.
    full_sessions: int = 4
    # How much longer than the median of the others a rank took that held up the pass.
    rank_skew: float = 1.5


THRESHOLDS = Thresholds()
