"""Compute rows and goals of `make bench-engine`, without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.harness import Goal, at_most
from galley.bench.summary import Interval, median_interval, ratio_interval

Measured = Mapping[str, Any]

MS = 1e3
INVARIANCE_BOUND = 0.10
SAMPLING_BOUND = 0.10
HOST_BOUND_MS = 3.0
PREFILL_BOUND = 1.0
# Of the time of one row: eight rows of one session, which verify seven draft tokens.
SMALL_BOUND = 1.2
# A pool eight times as large may not slow a step; the bound leaves room for the pages that it lies on.
POOL_BOUND = 1.05


@dataclass(frozen=True, slots=True)
class Band:
    """A range of rows, and how much of transformers' time a step in it may take."""

    first: int
    last: int
    bound: float


BANDS = (Band(1, 8, 0.6), Band(16, 80, 0.8), Band(81, 10**6, 1.0))


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step compared with transformers and with the time to read the weights once."""

    threads: int
    sessions: int
    tokens: int
    context: int
    peer_form: str
    ours_ms: float
    ours_cpu_ms: float
    peer_ms: float
    ratio: Interval
    of_roofline: float | None

    @property
    def rows(self) -> int:
        """Return the tokens of the step."""
        return self.sessions * self.tokens

    @property
    def split(self) -> str:
        """Return sessions and tokens as "8x5"."""
        return f"{self.sessions}x{self.tokens}"


def step_rows(threads: int, measured: Measured) -> list[StepRow]:
    """Return a row for each case, in the order in which they were measured."""
    floor = roofline_ms(measured)
    rows = []
    for found in measured.get("steps", ()):
        ours_ms = median_interval(found["ours"]).median * MS
        rows.append(
            StepRow(
                threads=threads,
                sessions=found["sessions"],
                tokens=found["tokens"],
                context=found["context"],
                peer_form=found["peer_form"],
                ours_ms=ours_ms,
                ours_cpu_ms=median_interval(found["ours_cpu"]).median * MS,
                peer_ms=median_interval(found["peer"]).median * MS,
                ratio=ratio_interval(found["ours"], found["peer"]),
                of_roofline=None if floor is None else floor / ours_ms,
            )
        )
    return rows


def roofline_ms(measured: Measured) -> float | None:
    """Return the least time of a step: all weights read once at the bandwidth that torch's sum reaches."""
    if "bandwidth" not in measured:
        return None
    return float(measured["weights_bytes"] / max(measured["bandwidth"].values()) * MS)


def row_costs(rows: Iterable[StepRow], threads: int, context: int) -> str:
    """Return the row-cost curve for `RowCostCurve.parse`: the quickest split of each number of rows."""
    best: dict[int, float] = {}
    for row in rows:
        if (row.threads, row.context) == (threads, context):
            best[row.rows] = min(row.ours_ms, best.get(row.rows, row.ours_ms))
    return ",".join(f"{count}:{ms / best[1]:.3f}" for count, ms in sorted(best.items())) if 1 in best else ""


# ----------------------------------------------------------------------------------------- parts --


@dataclass(frozen=True, slots=True)
class InvarianceRow:
    """The price of attention whose bits do not depend on the batch."""

    case: str
    step_ms: float
    attention_ms: float
    torch_ms: float
    torch_form: str
    share: Interval


def invariance_rows(measured: Measured) -> list[InvarianceRow]:
    """Return one row a case of `bench.engine.parts.invariance`."""
    rows = []
    for found in measured.get("invariance", ()):
        ours = _minus(found["step"], found["step_none"])
        theirs = _minus(found["torch"], found["torch_none"])
        rows.append(
            InvarianceRow(
                case=found["case"],
                step_ms=median_interval(found["step"]).median * MS,
                attention_ms=median_interval(ours).median * MS,
                torch_ms=median_interval(theirs).median * MS,
                torch_form=found["torch_form"],
                share=ratio_interval(_minus(ours, theirs), found["step"]),
            )
        )
    return rows


def _minus(left: Sequence[float], right: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(left, right, strict=True)]


def goals(by_threads: Mapping[int, Measured]) -> list[Goal]:
    """Return every goal that was measured, at each number of threads."""
    found: list[Goal] = []
    for threads, measured in by_threads.items():
        at = f"{threads} thread{'s' if threads > 1 else ''}"
        found += _step_goals(step_rows(threads, measured), at)
        found += _part_goals(measured, at)
    return found


def _step_goals(rows: Sequence[StepRow], at: str) -> list[Goal]:
    found = []
    for band in BANDS:
        inside = [row for row in rows if band.first <= row.rows <= band.last]
        if inside:
            worst = max(inside, key=lambda row: row.ratio.median)
            limits = f"{band.first} to {band.last}" if band.last < 10**6 else f"over {band.first - 1}"
            what = f"step against transformers, {limits} rows, {at}, worst: {worst.split}@{worst.context}"
            found.append(at_most("step", what, worst.ratio, band.bound, "x"))
    return found


def _part_goals(measured: Measured, at: str) -> list[Goal]:
    found = []
    rows = invariance_rows(measured)
    if rows:
        worst = max(rows, key=lambda row: row.share.median)
        what = f"our attention minus torch's, share of a step, {at}, worst: {worst.case}"
        found.append(at_most("invariance", what, worst.share, INVARIANCE_BOUND))
    if "sampling" in measured:
        part = measured["sampling"]
        share = ratio_interval(part["sampling"], part["step"])
        what = f"sampling {part['rows']} rows at temperature 1, no top-k, over their forward pass, {at}"
        found.append(at_most("sampling", what, share, SAMPLING_BOUND))
    if "host" in measured:
        host = median_interval([s * MS for s in measured["host"]["python"]])
        what = f"a whole pass of {measured['host']['sessions']} sessions, its arithmetic left out, {at}"
        found.append(at_most("host", what, host, HOST_BOUND_MS, " ms"))
    if "pools" in measured:
        part = measured["pools"]
        times = part["large_blocks"] / part["small_blocks"]
        what = f"step in a pool {times:.0f} times as large, same context, {at}"
        found.append(at_most("pool", what, ratio_interval(part["large"], part["small"]), POOL_BOUND, "x"))
    if "small" in measured:
        part = measured["small"]
        what = f"eight rows of one session against one row, {at}"
        found.append(at_most("small", what, ratio_interval(part["eight"], part["one"]), SMALL_BOUND, "x"))
    if "prefill" in measured:
        part = measured["prefill"]
        what = f"prefill of 182 tokens against transformers, {at}"
        found.append(at_most("prefill", what, ratio_interval(part["ours"], part["peer"]), PREFILL_BOUND, "x"))
    return found
