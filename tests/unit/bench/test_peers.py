"""Test what the benchmarks of engines compute: drafts, rates of differing positions, and their goals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.loops.run import Run
from bench.peers import drafts, scenarios
from bench.peers.differences import Row, Tie, count, first_difference, goals
from bench.peers.processes import check_engine
from tests.unit.galley.bench.blocks import block

PROMPT = [5, 6, 7, 8]
ANSWER = [5, 6, 7, 9, 5, 6, 7, 9, 5, 6] * 4


@pytest.mark.parametrize("kind", drafts.MAKERS)
def test_drafts_have_every_length_and_are_the_same_at_every_call(kind: str) -> None:
    made = drafts.MAKERS[kind]("name", PROMPT, ANSWER)
    assert made == drafts.MAKERS[kind]("name", PROMPT, ANSWER)
    assert len(made) == len(ANSWER)
    assert set(drafts.lengths("name", 500)) == set(range(drafts.MAX_K + 1))
    for draft, most in zip(made, drafts.lengths("name", len(ANSWER)), strict=True):
        assert len(draft) <= most


def test_right_drafts_are_the_answer_and_wrong_ones_differ_everywhere() -> None:
    right, wrong, spoiled = (
        drafts.MAKERS[kind]("name", PROMPT, ANSWER) for kind in ("right", "wrong", "spoiled")
    )
    for at in range(len(ANSWER)):
        expected = ANSWER[at : at + len(right[at])]
        assert right[at] == expected
        assert len(wrong[at]) == len(spoiled[at]) == len(expected)
        assert all(token != other for token, other in zip(wrong[at], expected, strict=True))
    pairs = [
        token == other
        for made, of in zip(spoiled, right, strict=True)
        for token, other in zip(made, of, strict=True)
    ]
    assert 0.5 < sum(pairs) / len(pairs) < 0.9


def test_ngram_drafts_repeat_what_followed_before_and_know_nothing_ahead() -> None:
    made = drafts.ngram("name", PROMPT, ANSWER)
    # After 5, 6, 7 the prompt went on with 8; no other continuation is known at that position.
    assert made[3][:1] in ([], [8])
    assert all(set(draft) <= {5, 6, 7, 8, 9} for draft in made)
    assert 8 not in made[-1]


def test_positions_count_up_to_the_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert count([[1, 2, 3], [1, 9, 3]], [[1, 2, 3], [1, 2, 3]]) == (5, 1)


_NONE = Row("galley-vllm", "bfloat16", 0.0, "none", 8, 500, 1)
_WRONG = replace(_NONE, drafts="wrong", streams=1, differing=3, verified=100)
_RIGHT = replace(_NONE, drafts="right", differing=0, verified=100, accepted=100)
_PEER = replace(_NONE, engine="vllm", differing=7)


def _met(*rows: Row, ties: tuple[Tie, ...] = ()) -> dict[str, bool]:
    return {goal.name: goal.met for goal in goals(rows, ties, "galley-vllm", "vllm")}


def test_the_worst_rate_is_judged_beside_the_peers_own() -> None:
    assert _met(_NONE, _WRONG, _RIGHT, _PEER) == {"same-tokens": True, "verified": True}
    worse = replace(_WRONG, differing=8)
    assert _met(_NONE, worse, _RIGHT, _PEER)["same-tokens"] is False
    with_ngram = replace(_PEER, drafts="ngram", differing=50)
    assert _met(_NONE, worse, _RIGHT, with_ngram, _PEER)["same-tokens"] is False


def test_only_near_ties_may_differ_in_float32() -> None:
    rows = [replace(row, dtype="float32", differing=0) for row in (_NONE, _WRONG, _RIGHT, _PEER)]
    near, far, elsewhere = (
        Tie("wrong", 1, temperature, 3, 5, gap) for temperature, gap in ((0.0, 1e-5), (0.0, 0.5), (0.8, 0.5))
    )
    assert _met(*rows, ties=(near, elsewhere)) == {"same-tokens": True, "float32": True, "verified": True}
    assert _met(*rows, ties=(near, far))["float32"] is False


def test_drafts_that_were_never_verified_prove_nothing() -> None:
    assert _met(_NONE, _WRONG, replace(_RIGHT, verified=0, accepted=0), _PEER)["verified"] is False
    assert _met(_NONE, replace(_WRONG, accepted=1), _RIGHT, _PEER)["verified"] is False
    assert _met(_NONE, _WRONG, replace(_RIGHT, accepted=99), _PEER)["verified"] is False


def test_a_bound_may_differ_by_the_number_of_streams() -> None:
    bounds = (scenarios.Bound("mine", "base", 1.25, at=((1, 1.5),)),)
    options = replace(scenarios.ENGINES.defaults, streams=(1, 8), temperatures=(0.0,))
    run = Run(options, Path(), Path(), print)
    run.blocks = [
        block(arm, seconds, pair=pair, streams=streams)
        for pair in range(3)
        for streams in (1, 8)
        for arm, seconds in (("mine", 1.0), ("base", 1.4))
    ]
    found = scenarios.goals(run, bounds)
    assert [(goal.name, goal.bound, goal.met) for goal in found] == [
        ("mine / base", ">= 1.5x", False),
        ("mine / base", ">= 1.25x", True),
    ]


@pytest.mark.parametrize("arm", ["off:int4", "engine:", "auto:vllm:int8"])
def test_an_arm_of_an_unknown_engine_is_refused(arm: str) -> None:
    options = replace(scenarios.ENGINES.defaults, arms=("vllm", arm))
    assert arm in scenarios.ENGINES.check(options)


def test_figures_of_another_engine_than_the_named_one_are_refused() -> None:
    paged, vllm = {"engine": "PagedEngine"}, {"engine": "VllmEngine"}
    check_engine(paged, "--quantization", "int8")
    check_engine(vllm, "--engine", "vllm")
    for ready, flags in ((paged, ("--engine", "vllm")), (vllm, ())):
        with pytest.raises(RuntimeError, match=r"must run a (Vllm|Paged)Engine"):
            check_engine(ready, *flags)


def test_every_arm_of_a_bound_is_measured_by_default() -> None:
    bounds = {arm for bound in scenarios.ENGINE_BOUNDS for arm in (bound.arm, bound.base)}
    assert bounds <= set(scenarios.ENGINES.defaults.arms)
    assert not scenarios.ENGINES.check(scenarios.ENGINES.defaults)
