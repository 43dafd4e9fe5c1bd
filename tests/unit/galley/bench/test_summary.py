"""What blocks come to: ratios of pairs, sums of rounds, the cost model beside them, and the sentence."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from galley.bench.answers import Answer
from galley.bench.closed_loop import LoopBlock
from galley.bench.plots import figure_of
from galley.bench.report import (
    acceptance_table,
    as_dict,
    prediction_table,
    report_of,
    speed_table,
    tree_table,
    verdict_table,
)
from galley.bench.summary import (
    mean_ratio,
    pass_times,
    predicted_best_k,
    predicted_gain,
    rows_of,
    speculated,
    speed_ratio,
)
from galley.core.session.events import SourceTokens
from tests.unit.galley.bench.blocks import block, rounds_of


def a_run(gain_at_8: float = 0.9) -> list[LoopBlock]:
    results = []
    for pair in range(3):
        slow = 1 + pair / 10
        for workload, gain in (("chat", 2.0), ("rewrite", 4.0)):
            results += [
                block("off", 0.04 * slow, workload=workload, pair=pair, rounds=rounds_of(0, 0)),
                block("auto", 0.04 * slow / gain, workload=workload, pair=pair, rounds=rounds_of(40, 30)),
                block("off", 0.08 * slow, workload=workload, streams=8, pair=pair),
                block("auto", 0.08 * slow / gain_at_8, workload=workload, streams=8, pair=pair),
            ]
    return results


def test_a_row_has_the_ratio_until_the_last_answer_beside_that_while_all_streams_ran() -> None:
    slow, fast = (replace(block(arm, 0.1, streams=4), busy_s=2.0) for arm in ("off", "auto"))
    requested = replace(slow, requested_s=(0.0,) * 4), replace(fast, requested_s=(0.0,) * 4, wall_s=2.0)
    row = next(row for row in rows_of(requested, "off") if row.arm == "auto")
    assert row.ratio is not None
    assert row.whole_ratio is not None
    assert (row.ratio.median, row.whole_ratio.median) == pytest.approx((1.0, 2.0))


def test_rows_are_ratios_of_pairs_and_the_baseline_stands_first() -> None:
    rows = rows_of(a_run(), "off")
    assert [(row.workload, row.streams, row.arm) for row in rows[:2]] == [
        ("chat", 1, "off"),
        ("chat", 1, "auto"),
    ]
    fast = next(row for row in rows if (row.workload, row.streams, row.arm) == ("rewrite", 1, "auto"))
    assert fast.ratio is not None
    assert (fast.ratio.median, fast.ratio.low, fast.ratio.high) == pytest.approx((4.0, 4.0, 4.0))
    assert fast.inter_token_ms[0] == pytest.approx(11.0)
    assert fast.cpu_ms_per_token == pytest.approx(10.0)


def test_the_mean_over_workloads_is_taken_within_each_pair() -> None:
    ratio = mean_ratio(a_run(), "auto", "off", 1)
    assert ratio is not None
    assert ratio.median == pytest.approx(3.0)
    assert ratio.count == 3
    unfinished = [b for b in a_run() if (b.load.workload, b.load.pair) != ("rewrite", 2)]
    shorter = mean_ratio(unfinished, "auto", "off", 1)
    assert shorter is not None
    assert shorter.median == pytest.approx(3.0)
    assert shorter.count == 2
    assert mean_ratio(a_run(), "hybrid-4", "off", 1) is None


def looping(arm: str, loop_s: float, streams: int = 1) -> LoopBlock:
    tokens = (*range(40), *(100 + at % 10 for at in range(40)))
    at_s = tuple(0.1 * (at + 1) if at < 40 else 4 + loop_s * (at - 39) for at in range(80))
    answer = Answer(tokens, at_s, at_s[-1])
    load = replace(block(arm, 0.1, streams=streams).load, max_tokens=80)
    return LoopBlock(load, (answer,) * streams, at_s[-1], 0.0)


def test_faster_loops_gain_nothing_at_one_stream() -> None:
    slow, fast = looping("off", 0.1), looping("auto", 0.02)
    counted = slow.answers[0].counted
    assert 40 < counted < 80
    ratio = speed_ratio([fast], [slow])
    assert ratio is not None
    assert ratio.median == pytest.approx((4 + 0.1 * (counted - 40)) / (4 + 0.02 * (counted - 40)))
    assert rows_of([slow], "off")[0].tokens_per_s == pytest.approx(10.0)


def test_at_more_streams_all_tokens_are_taken_over_the_wall_time() -> None:
    row = rows_of([looping("off", 0.1, streams=2)], "off")[0]
    assert row.tokens_per_s == pytest.approx(2 * 80 / 8)
    assert row.share_cut > 0


def test_rounds_are_summed_over_all_answers() -> None:
    of = speculated(b for b in a_run() if b.load.arm == "auto" and b.load.streams == 1)
    assert (of.rounds, of.verified, of.accepted) == (60, 240, 180)
    assert of.tokens_per_round == pytest.approx(4.0)
    assert of.by_position == (0.75,)
    assert of.exposed_share == pytest.approx(0.1)
    assert (of.wasted_draft, of.wasted_verify) == (480 - 180, 60)


def test_draft_tokens_are_summed_by_source() -> None:
    """What the gateway proposes itself is no waste of the draft."""
    one = replace(
        rounds_of(12, 9), sources=(SourceTokens("grammar", 4, 4, 4), SourceTokens("model", 8, 8, 5))
    )
    other = replace(rounds_of(2, 1), sources=(SourceTokens("model", 2, 2, 1),))
    of = speculated([block("auto", 0.03, rounds=one), block("auto", 0.03, rounds=other)])
    assert of.sources == (SourceTokens("grammar", 4, 4, 4), SourceTokens("model", 10, 10, 6))
    assert of.wasted_draft == of.proposed - 6


def test_model_predicts_tokens_per_round_time() -> None:
    """Leviathan et al., arXiv 2211.17192, section 3.3: 4 tokens in (40 + 10) ms against 30 ms each."""
    blocks = [
        block("off", 0.03, rounds=rounds_of(0, 0, target_ms=30)),
        block("model-4", 0.02, rounds=rounds_of(40, 30, target_ms=40, draft_ms=10)),
    ]
    times = pass_times(blocks)
    assert times is not None
    assert times.points == ((1, 30_000_000), (5, 40_000_000))
    drafted = speculated(blocks[1:])
    assert predicted_gain(drafted, 1, times) == pytest.approx(4 * 30 / 50)
    assert predicted_gain(speculated(blocks[:1]), 1, times) == 1.0
    assert predicted_best_k(speculated(blocks[:1]), 1, times, 16) is None
    best = predicted_best_k(drafted, 1, times, 16)
    assert best is not None
    assert 1 <= best <= 16


def test_trees_are_compared_with_chains_by_position_and_rank() -> None:
    chain = replace(
        rounds_of(40, 18),
        accepted_at=(6, 4),
        verified_at=(10, 8),
        accepted_by_rank=(10,),
        verified_by_rank=(18,),
    )
    tree = replace(chain, accepted_at=(8,), accepted_by_rank=(6, 2), verified_by_rank=(12, 8))
    blocks = [
        block(arm, 0.03, rounds=rounds)
        for arm, rounds in (("model-4", chain), ("model-4x2", tree))
        for _ in "12"
    ]
    report = report_of(blocks, "model-4", "m")
    columns = {str(column.header): list(column.cells) for column in tree_table(report.acceptance).columns[1:]}
    assert columns == {
        "arm": ["model-4", "model-4x2"],
        "tokens/round": ["2.80", "2.80"],
        "verified/round": ["4.00", "4.00"],
        "position 0": ["0.60", "0.80"],
        "position 1": ["0.50", "0.00"],
        "rank 0": ["0.56", "0.50"],
        "rank 1": ["", "0.25"],
    }
    assert [of.has_trees for of in report.acceptance.values()] == [False, True]
    by_arm = {row.arm: best for row, (_, best) in report.predicted.items()}
    assert by_arm["model-4"] is not None
    assert by_arm["model-4x2"] is None, "the model knows chains alone"


def test_nothing_is_foretold_where_no_round_was_counted() -> None:
    assert pass_times([block("off", 0.03)]) is None
    assert report_of([block("off", 0.03), block("auto", 0.03)], "off", "m").predicted == {}


def test_names_of_a_users_file_are_no_markup_and_no_control_codes() -> None:
    name = "list.qa [/hard] \x1b[31m$\\frac"
    blocks = [
        block(arm, 0.03, workload=name, rounds=rounds_of(40, accepted))
        for arm, accepted in (("off", 10), ("auto", 30))
    ]
    report = report_of(blocks, "off", "m")
    console = Console(file=io.StringIO(), width=200)
    for table in (
        speed_table(report.rows, "off"),
        verdict_table(report.gains),
        acceptance_table(report.acceptance),
        tree_table(report.acceptance),
        prediction_table(report.rows, report.predicted),
    ):
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue()
    assert printed.count("list.qa [/hard] \N{REPLACEMENT CHARACTER}[31m$\\frac") >= 5
    assert "\x1b" not in printed
    figure_of(report).savefig(io.BytesIO(), format="png")


def test_a_report_is_json() -> None:
    report = report_of(a_run(), "off", "m and its draft")
    result = json.loads(json.dumps(as_dict(report)))
    assert len(result["rows"]) == 8
    alone = next(row for row in result["rows"] if (row["streams"], row["arm"]) == (1, "auto"))
    assert alone["speculation"]["accepted_by_position"] == [0.75]
    assert alone["predicted_ratio"] == pytest.approx(4.0)
    assert result["conclusion"].startswith("Speculation pays for m and its draft up to 1 stream")
    assert [(gain["workload"], gain["streams"], gain["verdict"]) for gain in result["gains"]] == [
        ("", 1, "pays"),
        ("", 8, "does not pay"),
        ("chat", 1, "pays"),
        ("chat", 8, "does not pay"),
        ("rewrite", 1, "pays"),
        ("rewrite", 8, "does not pay"),
    ]


@pytest.mark.parametrize("read", [0, 3])
def test_the_share_of_proposals_that_read_states_is_shown_where_any_did(read: int) -> None:
    rounds = replace(rounds_of(40, 18), proposals=8, proposals_with_features=read)
    arms = {"model-4": rounds_of(40, 18), "features-4": rounds}
    report = report_of([block(arm, 0.03, rounds=of) for arm, of in arms.items()], "model-4", "m")
    columns = {str(of.header): list(of.cells) for of in acceptance_table(report.acceptance).columns}
    assert columns.get("with states") == (["", "38%"] if read else None)
