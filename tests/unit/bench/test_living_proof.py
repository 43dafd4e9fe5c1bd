"""Tests of the proof of living drafts: the drift of its traffic, its bad drafts, and its goals."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.living import planted
from bench.living.checks import Audits
from bench.living.comparison import AFTER, BEFORE, Comparison
from bench.living.prove import PLAN, Outcome, goals_of, record
from bench.living.sessions import PHASES, Finished, Request, Sessions, phase_at
from bench.living.trials import PlantedTrial, Promotion
from bench.living.workloads import ENGLISH, SPANISH, SQL, Mixture
from galley.bench.closed_loop import GatewayLoop
from galley.bench.summary import Interval
from galley.bench.workloads import Prompt
from galley.client.client import AsyncClient

SESSIONS, TOKENS = 4, 100


def test_the_traffic_drifts_to_workloads_that_the_shipped_draft_does_not_know() -> None:
    assert set(phase_at(0.0).weights) == {ENGLISH}
    assert max(phase_at(0.3).weights, key=phase_at(0.3).weights.__getitem__) == SQL
    assert max(phase_at(0.6).weights, key=phase_at(0.6).weights.__getitem__) == SPANISH
    assert phase_at(1.2) is PHASES[-1]
    assert phase_at(PHASES[0].ends) is PHASES[1]


def test_a_mixture_gives_no_prompt_twice_and_keeps_to_its_weights() -> None:
    given = list(islice(Mixture(1).endless({SQL: 0.9, ENGLISH: 0.1}), 2000))
    assert len({prompt.text for prompt in given}) == len(given)
    labels = Counter(prompt.label for prompt in given)
    assert labels[ENGLISH] / len(given) == pytest.approx(0.1, abs=0.03)
    others = list(islice(Mixture(2).endless({SQL: 1.0}), 2000))
    assert not {prompt.text for prompt in given} & {prompt.text for prompt in others}


@pytest.mark.parametrize("kind", planted.KINDS)
def test_a_bad_draft_has_the_form_of_a_good_one(kind: str, tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.mkdir()
    weights = {
        "lm_head.weight": torch.arange(-32, 32, dtype=torch.int8).reshape(16, 4),
        "lm_head.weight.scale": torch.arange(16.0),
        "model.layers.0.mlp.down_proj.weight": torch.full((4, 4), 3, dtype=torch.int8).triu(),
        "model.layers.0.mlp.down_proj.weight.scale": torch.ones(4),
    }
    save_file(weights, good / "model.safetensors")
    (good / "config.json").write_text('{"num_hidden_layers": 1, "hidden_size": 4}')
    planted.plant(kind, good, bad)
    found, config = load_file(bad / "model.safetensors"), json.loads((bad / "config.json").read_text())
    assert config["hidden_size"] == 4
    if kind == planted.SLOW:
        assert config["num_hidden_layers"] > 1
        added = found[f"model.layers.{config['num_hidden_layers'] - 1}.mlp.down_proj.weight"]
        assert added.dtype == torch.int8
        assert not added.any()
    else:
        assert config["num_hidden_layers"] == 1
        assert {name: one.shape for name, one in found.items()} == {
            name: one.shape for name, one in weights.items()
        }
        assert any(not torch.equal(found[name], weights[name]) for name in weights)


async def test_goals_are_met_by_a_run_without_faults() -> None:
    assert missed(await outcome()) == []


async def test_what_was_not_measured_is_missed() -> None:
    assert all(not goal.met for goal in goals_of(Outcome(), SESSIONS, TOKENS))


async def test_one_token_that_differs_is_a_missed_goal() -> None:
    run = await outcome()
    assert run.audits is not None
    run.audits.differing = 1
    assert "tokens" in missed(run)


async def test_a_session_that_was_not_audited_is_a_missed_goal() -> None:
    run = await outcome()
    assert run.audits is not None
    run.audits.sessions -= 1
    assert missed(run) == ["sessions"]


@pytest.mark.parametrize(("ended_by", "seconds"), [("roll_back by rule", 61.0), ("drain by proof", 5.0)])
async def test_a_late_roll_back_and_one_by_hand_are_missed_goals(ended_by: str, seconds: float) -> None:
    run = await outcome()
    run.planted = [trial(kind, ended_by, seconds) for kind, _ in PLAN]
    assert missed(run) == ["roll-back"] * len(PLAN)


async def test_a_promoted_bad_draft_is_a_missed_goal() -> None:
    run = await outcome()
    run.promotions = [Promotion(run.planted[0].version, "", 1.0, "better", {SQL: 1.0})]
    assert missed(run) == ["bad drafts"]


@pytest.mark.parametrize("after", [0.3, 0.45])
async def test_a_promotion_that_is_not_better_in_pairs_is_a_missed_goal(after: float) -> None:
    run = await outcome()
    run.compared = [compared(after)]
    assert missed(run) == ["promotions"]


async def test_a_false_alarm_is_a_missed_goal() -> None:
    run = await outcome()
    run.audit_proof = {**run.audit_proof, "audits": {"same": 3, "differs": 1}}
    assert missed(run) == ["audits"]


async def test_the_record_is_written_also_of_a_run_that_was_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("commit", "machine"):  # they start processes
        monkeypatch.setattr(f"bench.harness.{name}", str)
    for number, run in enumerate([Outcome(), await outcome()]):
        path = tmp_path / f"{number}.json"
        record(argparse.Namespace(record=path), run, goals_of(run, SESSIONS, TOKENS))
        assert len(json.loads(path.read_text())["goals"]) > 3


def missed(run: Outcome) -> list[str]:
    return [goal.name for goal in goals_of(run, SESSIONS, TOKENS) if not goal.met]


async def outcome() -> Outcome:
    """Return the outcome of a small run in which all is as it should be."""
    request = Request(Prompt("1", "text", label=SQL), 0.0, 1, 8)
    async with AsyncClient("127.0.0.1:1") as client:
        sessions = Sessions(GatewayLoop(client), SESSIONS, 2, "model-4")
    sessions.finished += [Finished(str(number), request, (1, 2)) for number in range(SESSIONS)]
    return Outcome(
        sessions=sessions,
        planted=[trial(kind, "roll_back by rule", 9.0) for kind, _ in PLAN],
        promotions=[Promotion("new", "", 1.0, "better", {SQL: 1.0})],
        audits=Audits(sessions=SESSIONS, tokens=8, verdicts={"same": SESSIONS}),
        asked_again=2,
        audit_proof={"planted": 4, "found": {"bit": 4}, "audits": {"same": 3}, "tokens": 92},
        compared=[compared(after=0.6)],
    )


def trial(kind: str, ended_by: str, seconds: float) -> PlantedTrial:
    return PlantedTrial(kind, f"planted {kind}", "SQL", 1.0, ended_by, "worse", seconds, seconds)


def compared(after: float) -> Comparison:
    gain, speed = Interval(after - 0.4, after - 0.5, after - 0.3, 7), Interval(1.0, 1.0, 1.0, 7)
    return Comparison({BEFORE: {"traffic": 0.4}, AFTER: {"traffic": after}}, gain, speed, {})
