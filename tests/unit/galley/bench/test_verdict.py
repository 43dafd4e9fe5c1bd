"""The verdict on speculation: by intervals, at each load and for each workload, and drawn as it is said."""

from __future__ import annotations

from typing import Any

import pytest

from galley.bench.closed_loop import LoopBlock, work_of
from galley.bench.plots import figure_of
from galley.bench.report import report_of, verdict_table
from galley.bench.summary import Interval
from galley.bench.verdict import Gain, best_by_load, gains_of, sentence
from tests.unit.galley.bench.blocks import block


def at(streams: int, ratio: float, arm: str = "auto", *, off_by: float = 0.02, pairs: int = 3) -> Gain:
    return Gain("", streams, arm, Interval(ratio, ratio - off_by, ratio + off_by, pairs))


@pytest.mark.parametrize(
    ("gains", "text"),
    [
        (
            [at(1, 1.6), at(8, 1.1), at(16, 0.9)],
            (
                "Speculation pays for m up to 8 streams (auto 1.60× [1.58, 1.62] at 1 stream, "
                "auto 1.10× [1.08, 1.12] at 8 streams). It does not pay at 16 streams "
                "(auto 0.90× [0.88, 0.92] at 16 streams)."
            ),
        ),
        (
            [at(1, 1.6), at(8, 1.14, off_by=0.2)],
            (
                "Speculation pays for m up to 1 stream (auto 1.60× [1.58, 1.62] at 1 stream). "
                "Undecided at 8 streams (auto 1.14× [0.94, 1.34] at 8 streams): "
                "more --repeats narrow the interval."
            ),
        ),
        (
            [at(1, 1.6), at(16, 1.2, "hybrid-4")],
            (
                "Speculation pays for m at every load measured, up to 16 streams "
                "(auto 1.60× [1.58, 1.62] at 1 stream, hybrid-4 1.20× [1.18, 1.22] at 16 streams)."
            ),
        ),
        (
            [at(1, 0.9), at(8, 0.8)],
            (
                "Speculation does not pay for m at any load measured (auto 0.90× [0.88, 0.92] at 1 stream, "
                "auto 0.80× [0.78, 0.82] at 8 streams)."
            ),
        ),
        (
            [at(1, 0.9), at(8, 1.2)],
            (
                "Speculation pays for m at 8 streams only (auto 1.20× [1.18, 1.22] at 8 streams). "
                "It does not pay at 1 stream (auto 0.90× [0.88, 0.92] at 1 stream)."
            ),
        ),
        (
            [at(1, 1.2, pairs=2), at(8, 1.3, pairs=2)],
            (
                "Whether speculation pays for m is undecided at 1 and 8 streams "
                "(auto 1.20× [1.18, 1.22] at 1 stream, auto 1.30× [1.28, 1.32] at 8 streams): "
                "it takes at least --repeats 3."
            ),
        ),
        ([], "Whether speculation pays for m is unknown: nothing was measured."),
    ],
)
def test_the_sentence_says_at_which_load_it_pays_by_the_interval(gains: list[Gain], text: str) -> None:
    assert sentence(gains, "m") == text


def a_run(pairs: int = 3) -> list[LoopBlock]:
    """Return blocks in which auto helps rewrite and harms chat at 1 stream; at 8 it varies around 1."""
    blocks = []
    for pair in range(pairs):
        for workload, gain in (("chat", 0.8), ("rewrite", 3.0)):
            blocks += [
                block("off", 0.04, workload=workload, pair=pair),
                block("auto", 0.04 / gain, workload=workload, pair=pair),
                block("ngram-4", 0.05, workload=workload, pair=pair),
                block("off", 0.08, workload=workload, streams=8, pair=pair),
                block("auto", 0.08 / (0.8, 1.1, 1.3)[pair], workload=workload, streams=8, pair=pair),
            ]
    return blocks


def test_each_workload_has_its_own_verdict() -> None:
    gains = gains_of(a_run(), "off")
    best = {
        (gain.workload, gain.streams): (gain.arm, gain.verdict)
        for workload in ("", "chat", "rewrite")
        for gain in best_by_load([one for one in gains if one.workload == workload])
    }
    assert best == {
        ("", 1): ("auto", "pays"),
        ("", 8): ("auto", "undecided"),
        ("chat", 1): ("auto", "does not pay"),
        ("chat", 8): ("auto", "undecided"),
        ("rewrite", 1): ("auto", "pays"),
        ("rewrite", 8): ("auto", "undecided"),
    }


def test_table_plot_and_sentence_have_the_same_figures() -> None:
    report = report_of(a_run(), "off", "m")
    table = verdict_table(report.gains)
    [workloads, _, arms, ratios, _] = [list(column.cells) for column in table.columns]
    assert (workloads[0], arms[0], ratios[0]) == ("mean", "auto", r"1.90 \[1.90, 1.90]")
    assert "auto 1.90× [1.90, 1.90] at 1 stream" in report.conclusion
    axes: Any = figure_of(report).axes[1]
    drawn = {bars.get_label(): bars.lines[0].get_xydata().tolist() for bars in axes.containers}
    assert drawn["auto"] == [[1.0, pytest.approx(1.9)], [8.0, pytest.approx(1.1)]]
    assert drawn["ngram-4"] == [[1.0, pytest.approx(0.8)]]


def test_work_grows_with_tokens_and_is_shared_by_streams() -> None:
    alone, eight = block("off", 0.1).load, block("off", 0.1, streams=8).load
    assert work_of(alone) == 48.0
    assert work_of(eight) == pytest.approx(8 * 48 / 8**0.5)
