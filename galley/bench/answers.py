"""The answers of a benchmark, as their clients see them.

An answer counts up to its first loop (`loop_start`): a small greedy model that repeats itself would favour
drafts that copy. The share that was cut is reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from galley.core.names import LOCAL_SOURCES
from galley.core.session.events import SourceTokens

LOOP_GRAM = 8
LOOP_TIMES = 3


def loop_start(tokens: Sequence[int]) -> int:
    """Return where the second of LOOP_TIMES equal n-grams of LOOP_GRAM tokens begins, else len(tokens)."""
    second: dict[tuple[int, ...], int] = {}
    seen: Counter[tuple[int, ...]] = Counter()
    for at in range(len(tokens) - LOOP_GRAM + 1):
        gram = tuple(tokens[at : at + LOOP_GRAM])
        seen[gram] += 1
        if seen[gram] == 2:
            second[gram] = at
        elif seen[gram] == LOOP_TIMES:
            return second[gram]
    return len(tokens)


@dataclass(frozen=True, slots=True)
class Rounds:
    """The gateway's counts of the rounds of one or more answers, summed; times in nanoseconds.

    `proposed` draft tokens arrived, of which `drafted` went to the target; `cancelled` proposals did not
    arrive. `accepted_at[i]` counts the rounds in which a draft token for position i was accepted, and
    `verified_at[i]` those in which any was verified. `accepted_by_rank` and `verified_by_rank` count draft
    tokens by rank among the candidates for their position. Of the `proposals` of the draft,
    `proposals_with_features` read the target's state of the token before the last confirmed one.
    `exposed_draft_ns` is the time in which the target waited for the draft. `sources` divides draft tokens by
    what proposed them.
    """

    rounds: int = 0
    proposed: int = 0
    cancelled: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    accepted_at: tuple[int, ...] = ()
    verified_at: tuple[int, ...] = ()
    accepted_by_rank: tuple[int, ...] = ()
    verified_by_rank: tuple[int, ...] = ()
    proposals: int = 0
    proposals_with_features: int = 0
    round_ns: int = 0
    exposed_draft_ns: int = 0
    draft_compute_ns: int = 0
    target_compute_ns: int = 0
    sources: tuple[SourceTokens, ...] = ()

    @property
    def tokens_per_round(self) -> float:
        """Return 1 + accepted / rounds, the mean accepted length; 0 without rounds."""
        return 1 + self.accepted / self.rounds if self.rounds else 0.0

    @property
    def by_position(self) -> tuple[float, ...]:
        """Return by position the share of rounds that accepted a draft token, of those that verified any."""
        return _shares(self.accepted_at, self.verified_at)

    @property
    def by_rank(self) -> tuple[float, ...]:
        """Return the share of verified draft tokens that was accepted, by rank."""
        return _shares(self.accepted_by_rank, self.verified_by_rank)

    @property
    def has_trees(self) -> bool:
        return len(self.verified_by_rank) > 1

    @property
    def feature_share(self) -> float:
        """Return the share of the proposals that read the target's state."""
        return self.proposals_with_features / self.proposals if self.proposals else 0.0

    @property
    def exposed_share(self) -> float:
        return self.exposed_draft_ns / self.round_ns if self.round_ns else 0.0

    @property
    def wasted_draft(self) -> int:
        """Return the draft's tokens that were not accepted, sent to the target or not."""
        own = sum(of.accepted for of in self.sources if of.source in LOCAL_SOURCES)
        return self.proposed - (self.accepted - own)

    @property
    def wasted_verify(self) -> int:
        return self.verified - self.accepted


def _shares(parts: Sequence[int], wholes: Sequence[int]) -> tuple[float, ...]:
    return tuple(part / whole for part, whole in zip_longest(parts, wholes, fillvalue=0) if whole)


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer as its client saw it: tokens, and when each came, in seconds from the request."""

    tokens: tuple[int, ...]
    at_s: tuple[float, ...]
    wall_s: float
    rounds: Rounds | None = None
    text: str = ""
    session_id: str = ""

    @property
    def counted(self) -> int:
        return loop_start(self.tokens)

    @property
    def counted_s(self) -> float:
        """Return the seconds from the request to the last counted token."""
        return self.at_s[self.counted - 1] if self.counted else self.wall_s
