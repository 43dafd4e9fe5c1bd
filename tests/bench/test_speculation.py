"""The speculation benchmark without models: its plan, its goals, the closed form, its record."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

from bench.arms import PEER_ASSISTED
from bench.closed_form import Heldout, agreement, match_chance, optimal_chance
from bench.peer_draft import LEAST, SpreadHead
from bench.speculation import report
from bench.speculation_estimate import estimate_s
from bench.speculation_goals import goals
from bench.speculation_options import SpeculationOptions, parse_options
from bench.speculation_run import SCOUT, Outcome, Planner
from galley.bench.closed_loop import WARM_UP, LoopBlock
from galley.core.acceptance import match_probability, total_variation
from tests.benching.blocks import block, rounds_of

SMALL = SpeculationOptions(streams=(1, 8), sets=("chat", "rewrite"), temperatures=(0.0, 0.7), pairs=7)
FIXED = ("ngram-4", "model-4", "hybrid-4")


# ------------------------------------------------------------------------------------- closed form --


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12))
def test_the_closed_form_in_v_log_v_is_the_paper_s(weights: list[tuple[int, int]]) -> None:
    """Daliri et al., arXiv 2408.07978; ties in p / q and tokens that one never draws included."""
    p, q = (np.array(of, dtype=np.float64) for of in zip(*weights, strict=True))
    if not (p.sum() and q.sum()):
        return
    p, q = p / p.sum(), q / q.sum()
    assert match_chance(p, q) == pytest.approx(match_probability(p.tolist(), q.tolist()), abs=1e-12)
    assert optimal_chance(p, q) == pytest.approx(1 - total_variation(p.tolist(), q.tolist()), abs=1e-12)
    assert match_chance(p, q) <= optimal_chance(p, q) + 1e-12


def test_measured_acceptance_agrees_within_its_sampling_interval_only() -> None:
    right = tuple(at % 2 == 0 for at in range(400))
    fair = agreement([Heldout((0.5,) * 400, (0.6,) * 400, right)])
    assert fair.agrees
    assert fair.high - fair.closed == pytest.approx(1.96 * 0.5 / 20, rel=1e-3)
    assert fair.positions == 400
    assert fair.optimal == pytest.approx(0.6)
    assert not agreement([Heldout((0.6,) * 400, (0.7,) * 400, right)]).agrees
    with pytest.raises(ValueError, match="guessed nothing"):
        agreement([])


def test_the_peer_s_draft_never_proposes_a_token_outside_our_head() -> None:
    head = nn.Linear(4, 3, bias=False)
    spread = SpreadHead(head, torch.tensor([1, 5, 6]), vocab=8)
    hidden = torch.randn(2, 5, 4)
    logits = spread(hidden)
    assert logits.shape == (2, 5, 8)
    assert torch.equal(logits[..., [1, 5, 6]], head(hidden))
    assert bool((logits[..., [0, 2, 3, 4, 7]] == LEAST).all())


# -------------------------------------------------------------------------------------------- plan --


def test_fixed_arms_are_scouted_and_the_best_are_paired_beside_off_and_auto() -> None:
    planner = Planner(SMALL, FIXED, (PEER_ASSISTED,))
    scouts = [load for load in planner.scouts() if load.pair == SCOUT]
    assert len(scouts) == 2 * 2 * 2 * 3
    greedy = {"ngram-4": 0.01, "hybrid-4": 0.02, "model-4": 0.03}
    sampled = {**greedy, "model-4": 0.001}
    best = planner.choose(
        [
            block(
                s.arm,
                (sampled if s.temperature else greedy)[s.arm],
                workload=s.workload,
                streams=s.streams,
                temperature=s.temperature,
                pair=SCOUT,
            )
            for s in scouts
        ]
    )
    assert best["chat", 1, 0.0] == ("ngram-4", "hybrid-4")
    assert best["rewrite", 8, 0.0] == ("ngram-4",)
    assert best["rewrite", 8, 0.7] == ("model-4",)
    pairs = [load for load in planner.pairs(best) if load.pair != WARM_UP]
    alone = {load.arm for load in pairs if (load.streams, load.temperature) == (1, 0.0)}
    assert alone == {"off", "auto", "ngram-4", "hybrid-4", PEER_ASSISTED}
    assert {load.arm for load in pairs if load.streams == 8} == {"off", "auto", "ngram-4", "model-4"}
    assert {(load.streams, len(load.prompts)) for load in pairs} == {(1, 3), (8, 16)}
    assert {load.temperature for load in pairs} == {0.0, 0.7}


def test_prompts_are_cached_for_all_arms_by_a_block_that_does_not_count() -> None:
    planner = Planner(SMALL, FIXED, (PEER_ASSISTED,))
    loads = planner.pairs(planner.choose([]))
    for streams, arms in ((1, 5), (8, 3)):
        here = [load for load in loads if load.streams == streams]
        for at in range(0, len(here), arms + 1):
            first, *group = here[at : at + arms + 1]
            assert (first.pair, first.arm, first.max_tokens) == (WARM_UP, "off", 1)
            assert all([p.text for p in load.prompts] == [p.text for p in first.prompts] for load in group)
            labels = {prompt.label for load in group for prompt in load.prompts}
            assert len(labels) == len(group)


def test_the_default_plan_is_below_an_hour_at_plain_decoding_s_pace() -> None:
    options = SpeculationOptions()
    fixed = tuple(f"{name}-{k}" for name in options.strategies for k in options.k)
    planner = Planner(options, fixed, (PEER_ASSISTED,))
    loads = [*planner.warm_up(), *planner.scouts(), *planner.pairs(planner.choose([]))]
    assert 40 * 60 < estimate_s(loads, options) < 60 * 60


# ------------------------------------------------------------------------------------------- goals --


def run_of(auto_at_8: float = 1.0, *, exposed: bool = False) -> list[LoopBlock]:
    """Seven pairs; alone, auto is 2 times as fast on chat and 4 times on rewrite; 1.1 times the peer."""
    counted = dataclasses.replace(rounds_of(40, 30), exposed_draft_ns=100_000_000 if exposed else 0)
    found = []
    for pair in range(7):
        for workload, gain in (("chat", 2.0), ("rewrite", 4.0)):
            for arm, token_s, streams in (
                ("off", 0.04, 1),
                ("auto", 0.04 / gain, 1),
                ("hybrid-4", 0.041 / gain, 1),
                (PEER_ASSISTED, 0.044 / gain, 1),
                ("off", 0.08, 8),
                ("auto", 0.08 / auto_at_8, 8),
            ):
                rounds = None if arm == PEER_ASSISTED else counted
                found.append(
                    block(arm, token_s, workload=workload, streams=streams, pair=pair, rounds=rounds)
                )
    return found


def test_every_goal_of_the_issue_is_judged() -> None:
    fair = agreement([Heldout((0.5,) * 4, (0.5,) * 4, (True, False) * 2)])
    found = goals(run_of(), fair)
    names = [goal.name for goal in found]
    assert names == [
        *("alone", "rewrite", "never-a-loss", "never-a-loss", "best-fixed", "best-fixed"),
        *("exposed", "exposed", "closed-form", "assisted", "assisted"),
    ]
    assert all(goal.met for goal in found), [str(goal) for goal in found if not goal.met]


def test_one_cell_below_its_bound_is_a_missed_goal_that_names_it() -> None:
    found = {(goal.name, "8 streams" in goal.what): goal for goal in goals(run_of(auto_at_8=0.9), None)}
    missed = found["never-a-loss", True]
    assert not missed.met
    assert "worst chat at 0, 2 of 2 missed" in missed.what
    assert found["never-a-loss", False].met
    assert not found["best-fixed", True].met  # off is a fixed choice, too


def test_a_draft_that_holds_the_target_up_is_told() -> None:
    exposed = [goal for goal in goals(run_of(exposed=True), None) if goal.name == "exposed"]
    assert [goal.met for goal in exposed] == [False, False]
    assert exposed[0].measured.startswith("25.00 ")


def test_rounds_that_nobody_counted_meet_no_goal() -> None:
    blocks = [block(arm, 0.04, pair=pair) for pair in range(7) for arm in ("off", "auto")]
    exposed = [goal for goal in goals(blocks, None) if goal.name == "exposed"]
    assert [(goal.met, goal.measured) for goal in exposed] == [(False, "no rounds in 7 of 7 pairs")] * 2


def test_a_fixed_arm_that_is_missed_is_not_hidden_by_one_that_is_met_at_a_lower_median() -> None:
    """Against model-2 0.96 throughout; against hybrid-4 0.97, but 0.60 in three pairs of seven."""
    blocks = [
        block(arm, token_s, pair=pair)
        for pair in range(7)
        for arm, token_s in (
            ("off", 0.1),
            ("auto", 0.05),
            ("model-2", 0.048),
            ("hybrid-4", 0.05 * (0.97 if pair < 4 else 0.60)),
        )
    ]
    (found,) = (goal for goal in goals(blocks, None, scouted=9) if goal.name == "best-fixed")
    assert not found.met
    assert found.measured.startswith("0.97 ")
    assert "best of 9 scouted" in found.what


def test_the_mean_of_the_workloads_names_them() -> None:
    assert "mean of chat, rewrite, 1 stream" in goals(run_of(), None)[0].what


# ------------------------------------------------------------------------------------------ record --


def test_the_report_prints_and_records_everything(tmp_path: Path) -> None:
    shown = io.StringIO()
    outcome = Outcome(blocks=run_of(), best={("chat", 1, 0.0): ("hybrid-4",)}, left_out=["model-8"])
    record = tmp_path / "abc.json"
    report(outcome, SMALL, Console(file=shown, width=200), {"commit": "abc"}, record)
    lines = shown.getvalue().splitlines()
    assert "left out: model-8" in lines
    assert "goal | what | measured | bound | met" in lines
    assert lines[-1].startswith("assisted | ")
    found = json.loads(record.read_text())
    assert found["left_out"] == ["model-8"]
    assert found["paired_fixed_arms"] == [
        {"workload": "chat", "streams": 1, "temperature": 0.0, "arms": ["hybrid-4"]}
    ]
    assert len(found["blocks"]) == len(outcome.blocks)
    assert found["conclusion"].startswith("Speculation pays")
    assert PEER_ASSISTED not in found["conclusion"]
    assert record.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_quick_run_is_short_and_leaves_nothing() -> None:
    options, root = parse_options(["--quick"], None)
    assert (options.pairs, options.streams, options.sets, root) == (1, (1,), ("chat",), None)
    assert report(Outcome(blocks=run_of()), options, Console(file=io.StringIO()), {}, root) == []


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--sets=poems"], "no set poems"),
        (["--parts=all"], "no part all"),
        (["--pairs=3"], "at least 7"),
        (["--k=0"], "at least 1"),
    ],
)
def test_options_out_of_bounds_are_refused(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_options(arguments, None)
    assert problem in capsys.readouterr().err
