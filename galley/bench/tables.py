"""A measurement of speculation as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from galley.bench.answers import Rounds
    from galley.bench.stats import Interval
    from galley.bench.summary import Row

_TIMES = "×"


def speed_table(rows: Sequence[Row], baseline: str) -> Table:
    table = Table(title="Speed (median of the repeats' ratios, 95 % interval)", title_justify="left")
    table.add_column("workload")
    for name in ("streams", "temp."):
        table.add_column(name, justify="right")
    table.add_column("arm")
    # Only a benchmark on the stack's own machine knows its CPU time.
    cpu = any(row.cpu_ms_per_token for row in rows)
    columns = ["tokens/s", f"against {baseline}", "first token ms", "between tokens ms", "cut"]
    columns += ["CPU ms/token"] if cpu else []
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.workload,
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


def acceptance_table(acceptance: Mapping[tuple[str, str], Rounds]) -> Table:
    table = Table(title="Acceptance and waste (over all loads)", title_justify="left")
    for name in ("workload", "arm"):
        table.add_column(name)
    columns = ("accepted", "tokens/round", "by position", "draft exposed", "wasted draft", "wasted verify")
    for name in columns:
        table.add_column(name, justify="right")
    for (workload, arm), of in acceptance.items():
        table.add_row(
            workload,
            arm,
            _share(of.accepted, of.verified),
            f"{of.tokens_per_round:.2f}",
            " ".join(f"{share:.2f}" for share in of.by_position),
            f"{of.exposed_share:.1%}",
            _share(of.wasted_draft, of.proposed),
            _share(of.wasted_verify, of.verified),
        )
    table.caption = (
        "accepted: share of the verified; draft exposed: share of the rounds' time that the target waited "
        "for the draft; wasted: share of the proposed, or of the verified, that was not accepted"
    )
    return table


def prediction_table(rows: Sequence[Row], predicted: Mapping[Row, tuple[float, int | None]]) -> Table:
    table = Table(title="Speed-up: the cost model and the measurement", title_justify="left")
    for name in ("workload", "streams", "arm", "predicted", "measured", "model's best k"):
        table.add_column(name, justify="left" if name in {"workload", "arm"} else "right")
    for row in rows:
        if row not in predicted or row.ratio is None:
            continue
        gain, best = predicted[row]
        measured = f"{row.ratio.median:.2f}{_TIMES}"
        table.add_row(
            row.workload,
            str(row.streams),
            row.arm,
            f"{gain:.2f}{_TIMES}",
            measured,
            "" if best is None else str(best),
        )
    return table


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else ""


def _escaped(ratio: Interval | None) -> str:
    # Rich would read its brackets as markup.
    return "" if ratio is None else str(ratio).replace("[", r"\[")
