"""The report of a measurement: rows, acceptance, predictions and the conclusion."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from galley.bench.answers import Rounds
from galley.bench.closed_loop import LoopBlock
from galley.bench.predict import pass_times, predicted_best_k, predicted_gain
from galley.bench.summary import PERCENTS, Row, rows_of, speculated
from galley.bench.verdict import best_at_loads, sentence

MAX_K = 16


@dataclass(frozen=True, slots=True)
class Report:
    """The results of all blocks; `predicted` is (speed-up, best k) of the cost model, by row."""

    baseline: str
    rows: tuple[Row, ...]
    acceptance: dict[tuple[str, str], Rounds]
    predicted: dict[Row, tuple[float, int | None]]
    pass_ms: tuple[tuple[int, float], ...]
    conclusion: str


def report_of(blocks: Sequence[LoopBlock], baseline: str, pair: str) -> Report:
    """Return the report of the blocks; `pair` names the models in the conclusion."""
    rows = tuple(rows_of(blocks, baseline))
    times = pass_times(blocks)
    predicted = (
        {}
        if times is None
        else {
            row: (
                predicted_gain(row.speculated, row.streams, times),
                predicted_best_k(row.speculated, row.streams, times, MAX_K),
            )
            for row in rows
            if row.speculated.verified
        }
    )
    return Report(
        baseline=baseline,
        rows=rows,
        acceptance=_acceptance(blocks),
        predicted=predicted,
        pass_ms=() if times is None else tuple((rows, ns / 1e6) for rows, ns in times.points),
        conclusion=sentence(best_at_loads(blocks, baseline), pair),
    )


def _acceptance(blocks: Sequence[LoopBlock]) -> dict[tuple[str, str], Rounds]:
    """Return the sums by (workload, arm), without those that verified nothing."""
    groups: dict[tuple[str, str], list[LoopBlock]] = defaultdict(list)
    for block in blocks:
        groups[block.load.workload, block.load.arm].append(block)
    sums = {of: speculated(mine) for of, mine in groups.items()}
    return {of: total for of, total in sums.items() if total.verified}


def as_dict(report: Report) -> dict[str, Any]:
    """Return the report for JSON."""
    return {
        "baseline": report.baseline,
        "percentiles": PERCENTS,
        "rows": [_row(report, row) for row in report.rows],
        "acceptance": [
            {"workload": workload, "arm": arm, **_figures(of)}
            for (workload, arm), of in report.acceptance.items()
        ],
        "pass_ms_by_rows": report.pass_ms,
        "conclusion": report.conclusion,
    }


def _row(report: Report, row: Row) -> dict[str, Any]:
    gain, best = report.predicted.get(row, (None, None))
    figures = asdict(row)
    del figures["speculated"]
    return {
        **figures,
        "predicted_ratio": gain,
        "predicted_best_k": best,
        "speculation": _figures(row.speculated),
    }


def _figures(of: Rounds) -> dict[str, Any]:
    return {
        **asdict(of),
        "tokens_per_round": of.tokens_per_round,
        "accepted_by_position": of.by_position,
        "exposed_draft_share": of.exposed_share,
        "wasted_draft": of.wasted_draft,
        "wasted_verify": of.wasted_verify,
    }
