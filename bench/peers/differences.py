"""Compare answers token by token, and judge how often they differ.

After the first difference an answer has another text before it, so that its further positions cannot be
compared. A rate is the number of answers that differ over the number of positions compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from bench.harness import Goal

NEAR_TIE = 1e-4
_PER = 1000


@dataclass(frozen=True, slots=True)
class Row:
    """Answers of `engine` under one kind of drafts, compared with its answers without drafts, alone.

    `differing` of `positions` compared have another token; the draft verified `verified` tokens, of which
    `accepted` were accepted.
    """

    engine: str
    dtype: str
    temperature: float
    drafts: str
    streams: int
    positions: int
    differing: int
    verified: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float:
        return self.differing / self.positions

    def __str__(self) -> str:
        return f"{_PER * self.rate:.2f} of {_PER} ({self.differing} of {self.positions})"


def first_difference(ours: Sequence[int], expected: Sequence[int]) -> int | None:
    """Return the first position with another token, or where only one of the two ends; None if equal."""
    if list(ours) == list(expected):
        return None
    pairs = zip(ours, expected, strict=False)
    at = next((i for i, (mine, other) in enumerate(pairs) if mine != other), None)
    return min(len(ours), len(expected)) if at is None else at


def count(answers: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return how many positions were compared, and how many of them differ."""
    ends = [first_difference(mine, other) for mine, other in zip(answers, expected, strict=True)]
    pairs = zip(ends, expected, strict=True)
    return sum(len(other) if end is None else end + 1 for end, other in pairs), len(ends) - ends.count(None)


@dataclass(frozen=True, slots=True)
class Tie:
    """A difference of a row of the table, with the distance of the two tokens' scores there, in logits."""

    drafts: str
    streams: int
    temperature: float
    prompt: int
    position: int
    gap: float

    @property
    def is_near(self) -> bool:
        return self.gap <= NEAR_TIE

    def __str__(self) -> str:
        cell = f"{self.drafts}, {self.streams} streams at {self.temperature:g}"
        return f"{cell}: prompt {self.prompt}, position {self.position}, scores {self.gap:.1e} apart"


def table(rows: Sequence[Row]) -> Table:
    """Return a line for each engine, drafts and number of streams; the other columns are the cells."""
    cells = list(dict.fromkeys((row.dtype, row.temperature) for row in rows))
    lines: dict[tuple[str, str, int], dict[tuple[str, float], str]] = {}
    for row in rows:
        cell = (row.dtype, row.temperature)
        lines.setdefault((row.engine, row.drafts, row.streams), {})[cell] = str(row)
    drawn = Table("engine", "drafts", "streams", *(f"{dtype} at {at:g}" for dtype, at in cells))
    for line, found in lines.items():
        drawn.add_row(*map(str, line), *(found.get(cell, "") for cell in cells))
    return drawn


def goals(rows: Sequence[Row], ties: Sequence[Tie], ours: str, peer: str) -> list[Goal]:
    """Bound our rates by the peer's own, alone against in company; float32 may differ at near ties only."""
    found = []
    for dtype, temperature in dict.fromkeys((row.dtype, row.temperature) for row in rows):
        cell = [row for row in rows if (row.dtype, row.temperature) == (dtype, temperature)]
        mine = [row for row in cell if row.engine == ours]
        worst = max(mine, key=lambda row: row.rate)
        what = (
            f"differing positions, {dtype} at {temperature:g}, worst: {worst.drafts}, {worst.streams} streams"
        )
        own = [row for row in cell if row.engine == peer and row.drafts == "none"]
        if own:
            bound = f"<= {own[0]}, {peer} alone against in company"
            found.append(Goal("same-tokens", what, str(worst), bound, worst.rate <= own[0].rate))
        if dtype == "float32":
            far = [tie for tie in ties if tie.temperature == temperature and not tie.is_near]
            what = f"differences that are no near ties, float32 at {temperature:g}"
            found.append(Goal("float32", what, str(len(far)), "0", not far))
        found.append(_verified(mine, dtype, temperature))
    return found


def _verified(rows: Sequence[Row], dtype: str, temperature: float) -> Goal:
    """Show that drafts were verified at all: wrong ones are refused, and right ones accepted."""
    wrong, right = ([row for row in rows if row.drafts == kind] for kind in ("wrong", "right"))
    refused = all(row.verified and not row.accepted for row in wrong)
    # After a difference, right draft tokens are those of another text.
    kept = all(row.verified and (row.accepted == row.verified or row.differing) for row in right)
    counts = ", ".join(f"{row.accepted} of {row.verified} {row.drafts}" for row in [*wrong, *right])
    what = f"accepted draft tokens, {dtype} at {temperature:g}"
    return Goal("verified", what, counts, "wrong none, right all", refused and kept)
