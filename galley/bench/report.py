"""The report of a measurement, with a sentence that says whether speculation pays, and its tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from galley.bench.answers import Rounds
from galley.bench.closed_loop import LoopBlock
from galley.bench.summary import (
    PERCENTS,
    Interval,
    Row,
    pass_times,
    predicted_best_k,
    predicted_gain,
    rows_of,
    speculated,
)
from galley.bench.verdict import Gain, best_by_load, gains_of, of_mean, sentence
from galley.common.printable import one_line

MAX_K = 16
_TIMES = "×"
_MOST_POSITIONS = 8
_TEXTS = {"workload", "arm", "verdict"}


@dataclass(frozen=True, slots=True)
class Report:
    """The results of all blocks; `predicted` is (speed-up, best k) of the cost model, by row.

    `gains` hold every arm at every load, for each workload and for their mean.
    """

    baseline: str
    rows: tuple[Row, ...]
    acceptance: dict[tuple[str, str], Rounds]
    predicted: dict[Row, tuple[float, int | None]]
    pass_ms: tuple[tuple[int, float], ...]
    gains: tuple[Gain, ...]
    conclusion: str

    def mean_gains(self) -> list[Gain]:
        """Return the gains in the mean over the workloads; those of the only workload if there is one."""
        return of_mean(self.gains)


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
    gains = tuple(gains_of(blocks, baseline))
    return Report(
        baseline=baseline,
        rows=rows,
        acceptance=_acceptance(blocks),
        predicted=predicted,
        pass_ms=() if times is None else tuple((rows, ns / 1e6) for rows, ns in times.points),
        gains=gains,
        conclusion=sentence(best_by_load(of_mean(gains)), pair),
    )


def _acceptance(blocks: Sequence[LoopBlock]) -> dict[tuple[str, str], Rounds]:
    groups: dict[tuple[str, str], list[LoopBlock]] = defaultdict(list)
    for block in blocks:
        groups[block.load.workload, block.load.arm].append(block)
    sums = {of: speculated(mine) for of, mine in groups.items()}
    return {of: total for of, total in sums.items() if total.verified}


def as_dict(report: Report) -> dict[str, Any]:
    return {
        "baseline": report.baseline,
        "percentiles": PERCENTS,
        "rows": [_row(report, row) for row in report.rows],
        "acceptance": [
            {"workload": workload, "arm": arm, **_figures(of)}
            for (workload, arm), of in report.acceptance.items()
        ],
        "pass_ms_by_rows": report.pass_ms,
        "gains": [{**asdict(gain), "verdict": gain.verdict} for gain in report.gains],
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
        "accepted_share_by_rank": of.by_rank,
        "proposals_with_features_share": of.feature_share,
        "exposed_draft_share": of.exposed_share,
        "wasted_draft": of.wasted_draft,
        "wasted_verify": of.wasted_verify,
    }


def speed_table(rows: Sequence[Row], baseline: str) -> Table:
    # Only a benchmark on the stack's own machine knows its CPU time.
    cpu = any(row.cpu_ms_per_token for row in rows)
    columns = ["workload", "streams", "temp.", "arm", "tokens/s", f"against {baseline}"]
    columns += ["first token ms", "between tokens ms", "cut", *(["CPU ms/token"] if cpu else [])]
    table = _table("Speed (median of the repeats' ratios, 95 % interval)", columns)
    for row in rows:
        table.add_row(
            _named(row.workload),
            str(row.streams),
            f"{row.temperature:g}",
            row.arm,
            f"{row.tokens_per_s:.1f}",
            "" if row.arm == baseline else _escaped(row.ratio),
            " / ".join(f"{ms:.0f}" for ms in row.first_token_ms),
            " / ".join(f"{ms:.1f}" for ms in row.inter_token_ms),
            f"{row.share_cut:.0%}",
            *([f"{row.cpu_ms_per_token:.1f}"] if cpu else []),
        )
    table.caption = "times are p50 / p90 / p99; cut: tokens in loops, which do not count at 1 stream"
    return table


def verdict_table(gains: Sequence[Gain]) -> Table:
    """Return the fastest arm of each workload at each load, and whether it pays."""
    columns = ("workload", "streams", "arm", "speed-up", "verdict")
    table = _table("Does it pay? (fastest arm, by workload)", columns)
    for workload in dict.fromkeys(gain.workload for gain in gains):
        for gain in best_by_load([one for one in gains if one.workload == workload]):
            ratio = _escaped(gain.ratio)
            table.add_row(_named(workload) or "mean", str(gain.streams), gain.arm, ratio, gain.verdict)
    return table


def acceptance_table(acceptance: Mapping[tuple[str, str], Rounds]) -> Table:
    columns = [
        "workload",
        "arm",
        "accepted",
        "by source",
        "tokens/round",
        "by position",
        "draft exposed",
        "wasted draft",
        "wasted verify",
    ]
    has_states = any(of.proposals_with_features for of in acceptance.values())
    columns += ["with states"] if has_states else []
    table = _table("Acceptance and waste (over all loads)", columns)
    for (workload, arm), of in acceptance.items():
        table.add_row(
            _named(workload),
            arm,
            _share(of.accepted, of.verified),
            "\n".join(f"{one.source} {one.accepted}/{one.verified}" for one in of.sources if one.verified),
            f"{of.tokens_per_round:.2f}",
            " ".join(f"{share:.2f}" for share in of.by_position),
            f"{of.exposed_share:.1%}",
            _share(of.wasted_draft, of.proposed),
            _share(of.wasted_verify, of.verified),
            *([_share(of.proposals_with_features, of.proposals)] if has_states else []),
        )
    table.caption = (
        "accepted: share of the verified; by source: accepted/verified; "
        "draft exposed: share of the rounds' time that the target waited "
        "for the draft; wasted: share of the proposed, or of the verified, that was not accepted"
    )
    if has_states:
        table.caption += "; with states: share of the proposals that read the target's state"
    return table


def tree_table(acceptance: Mapping[tuple[str, str], Rounds]) -> Table:
    """Return acceptance by position and by rank, of chains beside trees."""
    positions = min(_MOST_POSITIONS, max((len(of.by_position) for of in acceptance.values()), default=0))
    width = max((len(of.by_rank) for of in acceptance.values()), default=0)
    columns = ["workload", "arm", "tokens/round", "verified/round"]
    columns += [f"position {position}" for position in range(positions)]
    columns += [f"rank {rank}" for rank in range(width)]
    table = _table("Chains and trees: acceptance by position and by rank", columns)
    for (workload, arm), of in acceptance.items():
        table.add_row(
            _named(workload),
            arm,
            f"{of.tokens_per_round:.2f}",
            f"{of.verified / of.rounds:.2f}",
            *_padded(of.by_position, positions),
            *_padded(of.by_rank, width),
        )
    table.caption = (
        "position: share of the rounds with a draft token for it in which one was accepted; "
        "rank: share of the verified draft tokens of this rank that was accepted"
    )
    return table


def _padded(shares: Sequence[float], count: int) -> list[str]:
    return [f"{share:.2f}" for share in shares[:count]] + [""] * (count - len(shares))


def prediction_table(rows: Sequence[Row], predicted: Mapping[Row, tuple[float, int | None]]) -> Table:
    columns = ("workload", "streams", "arm", "predicted", "measured", "model's best k")
    table = _table("Speed-up: the cost model and the measurement", columns)
    for row in rows:
        if row not in predicted or row.ratio is None:
            continue
        gain, best = predicted[row]
        measured = f"{row.ratio.median:.2f}{_TIMES}"
        table.add_row(
            _named(row.workload),
            str(row.streams),
            row.arm,
            f"{gain:.2f}{_TIMES}",
            measured,
            "" if best is None else str(best),
        )
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in _TEXTS else "right")
    return table


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else ""


def _named(workload: str) -> str:
    # Its name is that of a user's file, with a category that the file holds.
    return escape(one_line(workload))


def _escaped(ratio: Interval | None) -> str:
    # Rich would read its brackets as markup.
    return "" if ratio is None else str(ratio).replace("[", r"\[")
