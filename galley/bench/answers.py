"""Answers of a gateway as a benchmark sees them.

An answer counts up to its first loop (`loop_start`): a small greedy model that repeats itself would favour
drafts that copy. The share that was cut is reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

LOOP_GRAM = 8
LOOP_TIMES = 3


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user turn.

    `label` is the workload under which the gateway counts acceptance and the draft learns. `max_tokens`
    bounds its answer; 0: the bound of the load.
    """

    id: str
    text: str
    label: str = ""
    max_tokens: int = 0


def loop_start(tokens: Sequence[int]) -> int:
    """Return the index at which the answer's first loop begins; len(tokens) if it has none.

    An answer loops once an n-gram of LOOP_GRAM tokens occurs LOOP_TIMES times (occurrences may overlap). The
    loop begins at the second occurrence.
    """
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
    """The gateway's counts of the rounds of one answer; `*_at` by position in the proposal."""

    rounds: int = 0
    proposed: int = 0
    cancelled: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    accepted_at: tuple[int, ...] = ()
    verified_at: tuple[int, ...] = ()
    orchestration_ns: tuple[int, ...] = ()
    round_ns: int = 0
    exposed_draft_ns: int = 0
    draft_compute_ns: int = 0
    target_compute_ns: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer as its client saw it: tokens, when each came (seconds from the request), and the cost."""

    prompt_id: str
    prompt_tokens: int
    tokens: tuple[int, ...]
    at_s: tuple[float, ...]
    wall_s: float
    cpu_s: float
    from_draft: tuple[bool, ...] = ()
    rounds: Rounds | None = None

    @property
    def counted(self) -> int:
        """Tokens up to the first loop."""
        return loop_start(self.tokens)

    @property
    def counted_s(self) -> float:
        """Return the seconds from the request to the last counted token."""
        return self.at_s[self.counted - 1] if self.counted else self.wall_s

    @property
    def counted_cpu_s(self) -> float:
        """The CPU time of the counted part, taken as its share of the wall time."""
        return self.cpu_s * self.counted_s / self.wall_s
