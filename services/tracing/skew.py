"""Clocks of several processes, made one.

A span of another process lies within its parent: it cannot begin before it was asked for, nor, unless its
caller gave it up, end after it was answered. Where a process's spans do not fit so, its clock is off by
something between what the one bound asks for and what the other allows; all its spans are shifted by the
middle of that. Where they fit, nothing is touched: what cannot be seen is not corrected.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from services.tracing.spans import Process, Span, SpanKey

# Less may come of how spans are timed.
_NEGLIGIBLE_NS = 100_000


@dataclass(frozen=True, slots=True)
class Shift:
    """`offset_ns` was added to the times of a process, judged by `pairs` calls from the process `against`.

    `fits`: with it, every one of them lies within its caller's span.
    """

    process: Process
    against: Process
    offset_ns: int
    pairs: int
    fits: bool


@dataclass(slots=True)
class _Edge:
    """What the calls from one process to another say of the other's clock: what to add to it."""

    least_ns: float = -math.inf
    most_ns: float = math.inf
    middles_ns: list[float] = field(default_factory=list)

    def add(self, parent: Span, child: Span) -> None:
        """Learn from one call."""
        least = parent.start_ns - child.start_ns
        self.least_ns = max(self.least_ns, least)
        if child.duration_ns <= parent.duration_ns:
            # Else it outlived its caller, who gave it up.
            most = parent.end_ns - child.end_ns
            self.most_ns = min(self.most_ns, most)
            self.middles_ns.append((least + most) / 2)

    @property
    def fits(self) -> bool:
        return self.least_ns <= self.most_ns

    def offset_ns(self, untouched_ns: int) -> int:
        """`untouched_ns`, which leaves the other's times as they are, if that fits."""
        if self.least_ns - _NEGLIGIBLE_NS <= untouched_ns <= self.most_ns + _NEGLIGIBLE_NS:
            return untouched_ns
        if not self.fits:
            return round(median(self.middles_ns))
        return round((self.least_ns + self.most_ns) / 2 if math.isfinite(self.most_ns) else self.least_ns)


def align(
    spans: Sequence[Span], by_key: Mapping[SpanKey, Span], first: Sequence[Process]
) -> tuple[Sequence[Span], tuple[Shift, ...]]:
    """The spans by one clock: that of the processes `first`, or of whoever is met first."""
    edges: dict[tuple[Process, Process], _Edge] = defaultdict(_Edge)
    for span in spans:
        parent = by_key.get((span.trace_id, span.parent_id))
        if parent is not None and parent.process != span.process:
            edges[parent.process, span.process].add(parent, span)
    offsets, shifts = _offsets(edges, [*first, *(parent for parent, _ in edges)])
    if not shifts:
        return spans, ()
    return [_shifted(span, offsets.get(span.process, 0)) for span in spans], tuple(shifts)


def _offsets(
    edges: Mapping[tuple[Process, Process], _Edge], roots: Sequence[Process]
) -> tuple[Mapping[Process, int], list[Shift]]:
    """Of each process, from the roots on along the calls, whichever way they went."""
    beside: dict[Process, list[tuple[Process, _Edge, int]]] = defaultdict(list)
    for (parent, child), edge in edges.items():
        beside[parent].append((child, edge, 1))
        beside[child].append((parent, edge, -1))
    offsets: dict[Process, int] = {}
    shifts: list[Shift] = []
    for root in roots:
        waiting = deque([root] if root not in offsets else [])
        offsets.setdefault(root, 0)
        while waiting:
            known = waiting.popleft()
            for other, edge, sign in beside[known]:
                if other in offsets:
                    continue
                offsets[other] = offsets[known] + sign * edge.offset_ns(-sign * offsets[known])
                waiting.append(other)
                if offsets[other]:
                    count = len(edge.middles_ns) or 1
                    shifts.append(Shift(other, known, offsets[other], count, edge.fits))
    return offsets, shifts


def _shifted(span: Span, offset_ns: int) -> Span:
    if not offset_ns:
        return span
    return replace(
        span,
        start_ns=span.start_ns + offset_ns,
        end_ns=span.end_ns + offset_ns,
        events=tuple(replace(event, time_ns=event.time_ns + offset_ns) for event in span.events),
    )
