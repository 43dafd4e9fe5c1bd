"""Test the harness of the loop benchmarks without models: its blocks, its sides, its goals and its record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from bench.loops import base, http, sessions, speculation, telemetry
from bench.loops.__main__ import SCENARIOS, parse_arguments
from bench.loops.options import Options
from bench.loops.run import Run, Scenario, loads
from bench.loops.sides import Spent
from galley.bench.answers import Rounds
from galley.bench.closed_loop import AUTO, OFF, WARM_UP, Load, LoopBlock
from tests.unit.galley.bench.blocks import block


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_arms_of_a_pair_do_the_same_work(scenario: Scenario) -> None:
    options = replace(scenario.defaults, pairs=2, streams=scenario.defaults.streams[:2])
    pairs: dict[tuple[int, str, int, float], list[Load]] = {}
    for load in loads(scenario, options, life=1):
        if load.pair != WARM_UP:
            pairs.setdefault((load.pair, load.workload, load.streams, load.temperature), []).append(load)
    for mine in pairs.values():
        assert {load.arm for load in mine} == set(options.arms)
        assert len({tuple(prompt.id for prompt in load.prompts) for load in mine}) == 1
        assert len({(load.seed, load.max_tokens) for load in mine}) == 1
    assert {pair for pair, *_ in pairs} == {2, 3}, "a life goes on where the one before ended"


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_no_arm_finds_a_prompt_cached_that_another_does_not(scenario: Scenario) -> None:
    options = replace(scenario.defaults, pairs=2, lives=2)
    seen: set[str] = set()
    tags: dict[str, str] = {}
    for load in (load for life in range(2) for load in loads(scenario, options, life)):
        if load.pair == WARM_UP:
            if load.max_tokens == 1:
                assert load.arm == scenario.primed_by
                seen |= {prompt.text for prompt in load.prompts}
            continue
        texts = {prompt.text for prompt in load.prompts}
        if scenario.primed_by:
            assert texts <= seen
        for text in texts:
            assert tags.setdefault(text, scenario.tag_of(load.arm)) == scenario.tag_of(load.arm)


def test_no_tree_answers_a_prompt_twice() -> None:
    answered: set[tuple[str, str]] = set()
    for load in loads(base.LOOPS, base.LOOPS.defaults, life=0):
        for prompt in load.prompts:
            answer = (load.arm.partition(":")[0], prompt.text)
            assert load.pair == WARM_UP or answer not in answered
            answered.add(answer)


_ROUNDS = Rounds(rounds=10, round_ns=1000, exposed_draft_ns=100)


def _run(options: Options, blocks: list[LoopBlock]) -> Run:
    run = Run(options, Path(), Path(), print)
    run.blocks = blocks
    return run


def _pairs(arms: Mapping[str, float], **cell: object) -> list[LoopBlock]:
    return [
        block(arm, seconds, pair=pair, rounds=_ROUNDS, **cell)  # type: ignore[arg-type]
        for pair in range(7)
        for arm, seconds in arms.items()
    ]


def test_a_loss_in_one_cell_misses_never_a_loss_and_names_the_cell() -> None:
    blocks = _pairs({OFF: 1.0, AUTO: 0.5, "ngram-4": 0.6})
    blocks += _pairs({OFF: 1.0, AUTO: 1.1, "ngram-4": 1.2}, workload="code", streams=8)
    blocks += _pairs({OFF: 1.0, AUTO: 0.9, "ngram-4": 1.2}, workload="chat", streams=8)
    goals = {
        (goal.name, "8 streams" in goal.what): goal
        for goal in speculation.goals(_run(speculation.SPECULATION.defaults, blocks))
    }
    assert goals["never-a-loss", False].met
    missed = goals["never-a-loss", True]
    assert not missed.met
    assert "worst code at 0, 1 of 2 missed" in missed.what
    assert goals["alone", False].met
    assert goals["exposed", False].met


def test_prompts_that_no_tuning_has_read_are_judged_alone() -> None:
    blocks = _pairs({OFF: 1.0, AUTO: 0.5}, workload="tasks") + _pairs({OFF: 1.0, AUTO: 1.0}, workload="code")
    blocks += _pairs({OFF: 1.0, AUTO: 0.8}, workload="tasks", streams=8)
    blocks += _pairs({OFF: 1.0, AUTO: 1.0}, workload="code", streams=8)
    goals = {g.name: g for g in speculation.goals(_run(speculation.SPECULATION.defaults, blocks))}
    assert goals["unread"].met
    assert goals["unread"].measured.startswith("2.00")
    assert not goals["alone"].met
    assert goals["at-eight"].measured.startswith("1.12")
    assert not goals["at-eight"].met


def test_the_most_that_drafts_can_gain_follows_from_acceptance_and_the_cost_of_rows() -> None:
    accepted, verified = (5, 2), (10, 10)  # E(1) = 1.5, E(2) = 1.7
    counts = replace(_ROUNDS, verified=20, accepted=7, accepted_at=accepted, verified_at=verified)
    plain = replace(_ROUNDS, target_compute_ns=10 * 20_000_000)
    drafted = replace(counts, target_compute_ns=10 * 30_000_000)  # three rows cost 1.5 times one
    blocks = [
        block(arm, 1.0, workload="code", rounds=rounds)
        for arm, rounds in ((OFF, plain), (AUTO, plain), ("ngram-2", drafted))
    ]
    run = _run(speculation.SPECULATION.defaults, blocks)
    speculation.goals(run)
    # k = 1: 1.5 / 1.25; k = 2: 1.7 / 1.5.
    assert run.facts["limits"] == {"code, 1 streams at 0": ["1.20x with k = 1", "1.69x with k = 2"]}


def test_a_cell_whose_interval_reaches_below_the_least_is_a_loss() -> None:
    met = {}
    for low in (0.952, 0.948):
        blocks = [
            block(arm, seconds, pair=pair, rounds=_ROUNDS)
            for pair in range(7)
            for arm, seconds in ((OFF, 1.0), (AUTO, 1 / low if pair < 3 else 1.0))
        ]
        goals = speculation.goals(_run(speculation.SPECULATION.defaults, blocks))
        met[low] = next(goal.met for goal in goals if goal.name == "never-a-loss")
    assert met == {0.952: True, 0.948: False}


def test_files_take_the_place_of_workloads_and_process_arms_get_first_turns(tmp_path: Path) -> None:
    path = tmp_path / "list.jsonl"
    path.write_text(
        '{"category": "qa", "turns": ["One?", "Two?"]}\n{"category": "rag", "turns": ["Three?", "Four?"]}\n',
        encoding="utf-8",
    )
    for name in ("speculation", "peers"):
        scenario, options, _ = parse_arguments([name, "--prompts", str(path), "--by-category"])
        found = list(loads(scenario, replace(options, streams=(1,)), life=0))
        assert {load.workload for load in found} == {"list.qa", "list.rag"}
        turns = {prompt.later_turns for load in found if load.max_tokens > 1 for prompt in load.prompts}
        assert turns == ({()} if name == "peers" else {("Two?",), ("Four?",)})


def test_a_file_without_prompts_ends_the_benchmark_before_it_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["speculation", "--prompts", str(tmp_path / "none.jsonl")])
    assert "--prompts:" in capsys.readouterr().err


def test_a_missed_fixed_choice_is_not_hidden_by_a_met_one() -> None:
    slower = _pairs({OFF: 1.0, AUTO: 0.5, "ngram-4": 0.4})
    goals = speculation.goals(_run(speculation.SPECULATION.defaults, slower))
    fixed = next(goal for goal in goals if goal.name == "best-fixed")
    assert not fixed.met
    assert "0.80" in fixed.measured


def test_waiting_for_the_draft_is_bounded_and_no_rounds_meet_no_goal() -> None:
    waits = _pairs({OFF: 1.0, AUTO: 0.5})
    held = [
        replace(
            one, answers=tuple(replace(a, rounds=replace(_ROUNDS, exposed_draft_ns=300)) for a in one.answers)
        )
        for one in waits
    ]
    without = [replace(one, answers=tuple(replace(a, rounds=None) for a in one.answers)) for one in waits]
    for blocks in (held, without):
        goals = speculation.goals(_run(speculation.SPECULATION.defaults, blocks))
        assert not any(goal.met for goal in goals if goal.name == "exposed")


def test_speed_cpu_and_start_up_are_compared_with_the_base() -> None:
    arms = {arm: 1.0 if arm.startswith(base.BASE) else 1.2 for arm in base.ARMS}
    blocks = _pairs(arms) + _pairs(arms, streams=16)
    options = replace(base.LOOPS.defaults, base="abc", temperatures=(0.0,))
    run = _run(options, blocks)
    run.facts = {"start_base_s": [10.0] * 7, "start_this_s": [9.0] * 7}
    met = {goal.name: [] for goal in base.goals(run)}  # type: ignore[var-annotated]
    for goal in base.goals(run):
        met[goal.name].append(goal.met)
    assert met == {"speed": [False] * 4, "cpu": [True] * 4, "start": [True]}


def test_telemetry_is_compared_with_the_mean_of_two_starts() -> None:
    added = {telemetry.OFF: 0.9, telemetry.AGAIN: 1.1, telemetry.FEW: 1.0, telemetry.ALL: 1.05}
    added[telemetry.MEASURED] = 1.2
    run = _run(telemetry.TELEMETRY.defaults, _pairs(dict.fromkeys(added, 1.0), streams=16))
    run.facts["spent"] = [
        Spent(pair, arm, 100, {"gateway": cpu_s, "target": 1.0})
        for pair in range(7)
        for arm, cpu_s in added.items()
    ]
    goals = {goal.what: goal.met for goal in telemetry.goals(run) if goal.name == "cpu"}
    assert list(goals.values()) == [True, False, True]
    assert run.facts["differing_answers"] == 0
    assert run.facts["added_cpu_us_a_token"][telemetry.MEASURED] == {"gateway": 2000.0, "target": 0.0}


def test_redis_cost_is_the_difference_of_a_pair() -> None:
    commits = [
        {"arm": arm, "pair": pair, "temperature": 0.0, "streams": 1, "median_ms": median_ms + pair}
        for pair in range(7)
        for arm, median_ms in ((sessions.REDIS, 0.9), (sessions.INSTANT, 0.5))
    ]
    assert sessions.added_ms(commits, 1).median == pytest.approx(0.4)
    assert sessions.StoredBytes(bytes=1000, tokens=100).beside_tokens == 600


def test_http_is_compared_with_grpc_pair_by_pair() -> None:
    options = replace(http.BESIDE_GRPC.defaults, streams=(16,))
    for http_s, cpu_s, met in ((1.0, 1.05, [True, True]), (1.5, 1.2, [False, False])):
        blocks = [
            replace(one, cpu_s=cpu_s if one.load.arm == http.HTTP else 1.0)
            for one in _pairs({http.GRPC: 1.0, http.HTTP: http_s}, streams=16)
        ]
        run = _run(options, blocks)
        assert [goal.met for goal in http.goals(run)] == met
        assert run.facts["differing_answers"] == 0
        run.blocks[0] = replace(blocks[0], answers=(replace(blocks[0].answers[0], tokens=(1,)),) * 16)
        http.goals(run)
        assert run.facts["differing_answers"] == 16


def test_the_log_is_judged_on_each_number_of_threads_and_may_add_more_at_many_streams() -> None:
    options = replace(sessions.SESSIONS.defaults, temperatures=(0.0,))
    times = {"instant": 1.0, "redis": 1.0, "instant:2": 1.0, "redis:2": 1.1}
    run = _run(options, _pairs(times) + _pairs(times, streams=16))
    run.facts["commits"] = [
        {"arm": arm, "pair": pair, "temperature": 0.0, "streams": streams, "median_ms": median_ms}
        for pair in range(7)
        for streams in (1, 16)
        for arm, median_ms in (("instant", 0.1), ("redis", 0.9), ("instant:2", 0.1), ("redis:2", 0.5))
    ]
    run.facts["beside_tokens_bytes"] = [808] * 7
    met = [(goal.name, goal.met) for goal in sessions.goals(run)]
    assert met[:3] == [("throughput", True), ("commit", False), ("commit", True)]
    assert met[3:] == [("throughput", False), ("commit", True), ("commit", True), ("memory", True)]


@pytest.mark.parametrize(
    "arms", ["instant,redis,redis:2", "instant,redis,redis:x,instant:x", "instant,redis,none"]
)
def test_an_arm_of_the_store_needs_its_counterpart(arms: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["sessions", "--arms", arms])
    assert "--arms:" in capsys.readouterr().err
