"""Put the clocks of several processes on one.

A server's span cannot start before its caller's, nor end after it. If a process's spans do, its clock is
off. All its spans are then shifted by the middle of the offsets that both bounds allow, or by the lower bound
if there is no upper one. Spans that fit within a tolerance are not shifted.

The second bound holds only if the caller waited for the response. Calls that were cancelled, superseded or
longer than their caller's span are ignored for it; so are those that contradict another call's first bound.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from galley.core import names
from galley.trace.read.spans import Process, Span, SpanKey

# Smaller differences come from timing: a server ends its span shortly after it has sent the response.
_NEGLIGIBLE_NS = 100_000
_LATE_NS = 2_000_000
# Spans that are below a call but may outlast it, for they serve others, too.
_STEPS = (names.VERIFY_BATCH, names.DRAFT_BATCH)
# Outcomes of requests whose caller no longer waited.
_GIVEN_UP = ("cancelled", "superseded")


@dataclass(frozen=True, slots=True)
class Shift:
    """A correction of a clock: `offset_ns` was added to the times of `process`.

    It is estimated from `calls` calls between it and `against`, of which `unfit` still end too late.
    """

    process: Process
    against: Process
    offset_ns: int
    calls: int
    unfit: int


@dataclass(slots=True)
class _Edge:
    """The bounds that the calls of one process to another put on the offset of the called one's clock."""

    least_ns: float = -math.inf
    calls: int = 0
    # The upper bound from each call whose caller waited for the response.
    most_ns: list[int] = field(default_factory=list)

    def add(self, parent: Span, child: Span) -> None:
        self.calls += 1
        self.least_ns = max(self.least_ns, parent.start_ns - child.start_ns)
        if child.text(names.OUTCOME) not in _GIVEN_UP and child.duration_ns <= parent.duration_ns:
            self.most_ns.append(parent.end_ns - child.end_ns)

    @property
    def unfit(self) -> int:
        """Return the number of calls whose upper bound is below the lower bound of another call."""
        return sum(most < self.least_ns for most in self.most_ns)

    def offset_ns(self, untouched_ns: int) -> int:
        """Return `untouched_ns`, the offset that shifts nothing, if it is within the bounds and a tolerance.

        Otherwise return their middle, or the lower bound if there is no upper one.
        """
        most_ns = min((most for most in self.most_ns if most >= self.least_ns), default=math.inf)
        if self.least_ns - _NEGLIGIBLE_NS <= untouched_ns <= most_ns + _LATE_NS:
            return untouched_ns
        return round((self.least_ns + most_ns) / 2 if math.isfinite(most_ns) else self.least_ns)


def align(
    spans: Sequence[Span], by_key: Mapping[SpanKey, Span], first: Sequence[Process]
) -> tuple[Sequence[Span], tuple[Shift, ...]]:
    """Return the spans on one clock, and the shifts that this took.

    Processes that calls connect get the clock of the earliest of them in `first`, else of the first caller.
    Others keep their own.
    """
    edges: dict[tuple[Process, Process], _Edge] = defaultdict(_Edge)
    for span in spans:
        parent = by_key.get((span.trace_id, span.parent_id))
        if parent is not None and parent.process != span.process and span.name not in _STEPS:
            edges[parent.process, span.process].add(parent, span)
    offsets, shifts = _offsets(edges, [*first, *(parent for parent, _ in edges)])
    if not shifts:
        return spans, ()
    return [_shifted(span, offsets.get(span.process, 0)) for span in spans], tuple(shifts)


def _offsets(
    edges: Mapping[tuple[Process, Process], _Edge], roots: Sequence[Process]
) -> tuple[Mapping[Process, int], list[Shift]]:
    """Return the offsets and shifts of the processes that calls connect to the roots in either direction."""
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
                    shifts.append(Shift(other, known, offsets[other], edge.calls, edge.unfit))
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
