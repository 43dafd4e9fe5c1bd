"""Sampling against a naive reference, its tie rules, its history rules, and its refusals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from galley.core import noise
from galley.core.errors import Broken
from galley.core.records import PositionLogprobs
from galley.core.sampling_params import MIN_REPETITION_PENALTY, SamplingParams
from galley.core.step import Draw, GrowingTokens, Sampled
from galley.engine.cpu.kernels import openmp
from galley.engine.sampler import draw_all
from galley.engine.sampling.gumbel import gumbel as compiled_gumbel
from tests.integration.galley.engine.sampling_reference import allowing, expected, sample

GREEDY = SamplingParams(temperature=0.0)


def draw_of(
    params: SamplingParams,
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
    stops: Sequence[int] = (),
    min_tokens: int = 0,
) -> Draw:
    return Draw(params, (*prompt, *output), len(prompt), frozenset(stops), min_tokens)


def one(logits: Sequence[float], draw: Draw) -> int:
    (token,) = sample(torch.tensor([logits], dtype=torch.float32), draw)
    return token


def reachable(logits: Sequence[float], params: SamplingParams, draws: int = 400) -> set[int]:
    return {one(logits, draw_of(replace(params, seed=seed))) for seed in range(draws)}


@st.composite
def cases(draw: st.DrawFn) -> tuple[NDArray[np.float32], Draw]:
    vocab = draw(st.integers(1, 33))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.integers(1, 5))
    rows = (rng.normal(size=(count, vocab)) * draw(st.sampled_from([0.1, 2.0, 20.0]))).astype(np.float32)
    token = st.integers(0, vocab - 1)
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.05, 0.8, 1.2, 30.0])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.31, 0.001])),
        top_k=draw(st.sampled_from([0, 1, 3, 50])),
        min_p=draw(st.sampled_from([0.0, 0.07])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.7, -0.4])),
        presence_penalty=draw(st.sampled_from([0.0, 0.9])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
        logit_bias=draw(st.dictionaries(token, st.sampled_from([-100.0, 1.5]), max_size=2)),
        seed=draw(st.integers(0, 2**64 - 1)),
    )
    prompt, output = draw(st.lists(token, min_size=1, max_size=5)), draw(st.lists(token, max_size=5))
    stops = draw(st.lists(token, max_size=2)) if vocab > 2 else []
    own = draw_of(params, prompt, output, stops, draw(st.integers(0, 8)))
    if draw(st.booleans()):
        own = allowing(own, [draw(st.sets(token)) for _ in rows], vocab)
    return rows, with_guesses(rng, rows, own)


@settings(max_examples=400)
@given(cases())
def test_tokens_are_those_of_the_definition(case: tuple[NDArray[np.float32], Draw]) -> None:
    rows, draw = case
    (outcome,) = draw_all(torch.from_numpy(rows), [draw])
    assert tokens_of(outcome) == tokens_of(expected(rows, draw))


@pytest.mark.parametrize("spread", [0.0, 0.05, 1.0, 4.0, 40.0])
@pytest.mark.parametrize("vocab", [4, 1021, 49152])
def test_pruning_never_changes_the_winner(vocab: int, spread: float) -> None:
    rng = np.random.default_rng(vocab)
    for position in range(1, 13):
        row = (rng.normal(size=vocab) * spread).astype(np.float32)
        draw = draw_of(SamplingParams(seed=5), prompt=[0] * position)
        shifted = (row - row.max()).astype(np.float64)
        scores = shifted + noise.gumbel(noise.words(5, position, range(vocab)))
        assert sample(torch.from_numpy(row[None]), draw) == [int(scores.argmax())]


def test_a_row_does_not_depend_on_its_batch() -> None:
    rng = np.random.default_rng(2)
    rows = torch.from_numpy(rng.normal(size=(6, 999)).astype(np.float32) * 4)
    params = SamplingParams(temperature=0.8, top_p=0.95, top_k=300, frequency_penalty=0.5, seed=9)
    alone: list[int] = []
    for i in range(6):
        alone += sample(rows[i : i + 1].clone(), draw_of(params, output=alone))
    assert sample(rows, draw_of(params), alone[:5]) == alone


@pytest.mark.parametrize(("seed", "length"), [(0, 1), (2**64 - 1, 5), (2**32 + 5, 2**32 + 7), (3, 2**40)])
def test_the_noise_is_of_all_bits_of_seed_and_position(seed: int, length: int) -> None:
    draw = Draw(SamplingParams(seed=seed), range(length), 1, frozenset(), 0)
    of_noise = noise.gumbel(noise.words(seed, length, range(9999)))
    assert sample(torch.zeros(1, 9999), draw) == [int(of_noise.argmax())]


def test_compiled_logarithms_are_numpys_but_for_the_last_bits() -> None:
    of_words = np.concatenate(([0, 1, 2**32 - 2, 2**32 - 1], noise.words(1, 2, range(5000))))
    got = [compiled_gumbel(int(word)) for word in of_words]
    np.testing.assert_allclose(got, noise.gumbel(of_words.astype(np.uint32)), rtol=0, atol=1e-14)


SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 1.6},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.92},
    "min_p": {"min_p": 0.02},
    "filtered": {"temperature": 0.8, "top_k": 400, "top_p": 0.7, "min_p": 0.001},
    "penalized": {"frequency_penalty": 0.6, "presence_penalty": -0.3, "repetition_penalty": 1.2},
    "greedy and penalized": {"temperature": 0.0, "frequency_penalty": 1.1, "repetition_penalty": 0.8},
    "biased": {"logit_bias": {3: 7.5, 11: -100.0, 200: 2.0}},
}


def a_draw(rng: np.random.Generator, vocab: int, shape: dict[str, Any]) -> Draw:
    history = rng.integers(0, vocab + 3, size=int(rng.integers(1, 60))).tolist()
    return Draw(
        replace(SamplingParams(seed=int(rng.integers(0, 2**63))), **shape),
        history,
        prompt_len=int(rng.integers(1, len(history) + 1)),
        stop_token_ids=frozenset(rng.integers(0, vocab, size=vocab // 8).tolist()),
        min_tokens=int(rng.integers(0, 40)),
        logprobs=[None, 0, 5][int(rng.integers(0, 3))],
    )


def constrained(rng: np.random.Generator, draw: Draw, rows: NDArray[np.float32]) -> Draw:
    """Return the draw with masks that allow few, half or all tokens, or without masks."""
    vocab, share = rows.shape[1], rng.choice([0.0, 0.02, 0.5, 1.0])
    if share == 0.0:
        return draw
    return allowing(draw, [np.flatnonzero(rng.random(vocab) <= share).tolist() for _ in rows], vocab)


def some_rows(rng: np.random.Generator, vocab: int) -> NDArray[np.float32]:
    rows = rng.normal(size=(int(rng.integers(1, 5)), vocab)) * rng.choice([0.0, 0.5, 3.0, 9.0])
    kind = rng.integers(0, 6)
    if kind == 0:
        rows = np.round(rows)  # -0.0 among them
    elif kind == 1:
        rows[rng.random(rows.shape) < 0.7] = -np.inf
    elif kind == 2:
        rows[-1] = rng.choice([-np.inf, np.nan, np.inf])
    logits: NDArray[np.float32] = rows.astype(np.float32)
    return logits


def with_guesses(rng: np.random.Generator, rows: NDArray[np.float32], draw: Draw) -> Draw:
    right: list[int] = []
    for i in range(len(rows) - 1):
        allowed = None if draw.allowed is None else draw.allowed[: i + 1]
        before = replace(draw, draft_tokens=tuple(right), logprobs=None, allowed=allowed)
        own = expected(rows[: i + 1], before)
        right.append(own.tokens[-1] if own else 0)
    if right and rng.random() < 0.5:
        right[-1] += 1
    return replace(draw, draft_tokens=tuple(right))


@pytest.mark.parametrize(("vocab", "times"), [(1, 30), (7, 60), (257, 30), (3001, 8), (49152, 1)])
def test_a_step_equals_the_definition_of_each_draw(
    vocab: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(vocab)
    shapes = [shape for shape in SHAPES.values() for _ in range(times)]
    rows = [some_rows(rng, vocab) for _ in shapes]
    draws = [
        with_guesses(rng, own, constrained(rng, a_draw(rng, vocab, shape), own))
        for own, shape in zip(rows, shapes, strict=True)
    ]
    outcomes = draw_all(torch.from_numpy(np.concatenate(rows)), draws)
    answers = [expected(own, draw) for own, draw in zip(rows, draws, strict=True)]
    assert [tokens_of(outcome) for outcome in outcomes] == [tokens_of(answer) for answer in answers]
    for outcome, answer in zip(outcomes, answers, strict=True):
        if answer is not None:
            assert_same_logprobs(logprobs_of(outcome), answer.logprobs)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(openmp, "_WORTH_NS", 0)
    shared_out = draw_all(torch.from_numpy(np.concatenate(rows)), draws)
    assert [str(outcome) for outcome in shared_out] == [str(outcome) for outcome in outcomes]


def tokens_of(outcome: object) -> tuple[int, ...] | None:
    return outcome.tokens if isinstance(outcome, Sampled) else None


def logprobs_of(outcome: object) -> tuple[PositionLogprobs, ...]:
    assert isinstance(outcome, Sampled)
    return outcome.logprobs


def assert_same_logprobs(ours: Sequence[PositionLogprobs], theirs: Sequence[PositionLogprobs]) -> None:
    assert len(ours) == len(theirs)
    for own, their in zip(ours, theirs, strict=True):
        assert [i for i, _ in own.top] == [i for i, _ in their.top]
        assert own.logprob == pytest.approx(their.logprob, abs=1e-5)
        assert [x for _, x in own.top] == pytest.approx([x for _, x in their.top], abs=1e-5)


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("shape", ["plain", "greedy", "filtered", "penalized"])
def test_a_bad_row_fails_its_own_draw(shape: str, bad: float) -> None:
    rng = np.random.default_rng(8)
    rows = torch.from_numpy(rng.normal(size=(3, 5000)).astype(np.float32))
    draws = [draw_of(replace(SamplingParams(seed=i), **SHAPES[shape])) for i in range(3)]
    whole = draw_all(rows, draws)
    rows[1] = bad
    first, broken, last = draw_all(rows, draws)
    assert [first, last] == [whole[0], whole[2]]
    assert isinstance(broken, Broken)
    assert "position 1:" in str(broken)


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("shape", ["plain", "greedy", "filtered", "penalized"])
def test_a_bad_row_keeps_what_was_accepted_before_it(shape: str, logprobs: int | None) -> None:
    rng = np.random.default_rng(9)
    rows = torch.from_numpy(rng.normal(size=(4, 500)).astype(np.float32))
    draw = replace(draw_of(replace(SamplingParams(seed=3), **SHAPES[shape])), logprobs=logprobs)
    guesses: tuple[int, ...] = ()
    for _ in range(3):
        guesses = tuple(sample(rows[: len(guesses) + 1], draw, guesses))
    for bad in (1, 2, 3):
        spoiled = rows.clone()
        spoiled[bad] = math.nan
        (outcome,) = draw_all(spoiled, [replace(draw, draft_tokens=guesses)])
        assert tokens_of(outcome) == guesses[:bad], "no token of its own: the next pass is the one that fails"
        assert len(logprobs_of(outcome)) == (0 if logprobs is None else bad)


def test_infinite_logits_are_bad_with_logprobs() -> None:
    # The infinite one is masked for sampling, but logprobs are of the logits as they are.
    rows = torch.zeros(2, 9)
    rows[1, 4] = math.inf
    draw = replace(draw_of(GREEDY), draft_tokens=(0,), stop_token_ids=frozenset({4}), min_tokens=5)
    assert tokens_of(draw_all(rows, [draw])[0]) == (0, 0)
    assert tokens_of(draw_all(rows, [replace(draw, logprobs=1)])[0]) == (0,)
    assert isinstance(draw_all(rows[1:], [replace(draw, draft_tokens=(), logprobs=1)])[0], Broken)


@pytest.mark.parametrize("at", [0, 4998])
def test_a_single_nan_is_found_wherever_it_stands(at: int) -> None:
    for nan in (np.float32(math.nan), np.array([0xFFC00001], dtype=np.uint32).view(np.float32)[0]):
        rows = np.zeros((1, 4999), dtype=np.float32)
        rows[0, at] = nan
        with pytest.raises(Broken):
            sample(torch.from_numpy(rows), draw_of(GREEDY))


def test_no_draws_are_no_outcomes() -> None:
    assert draw_all(torch.zeros(0, 9), []) == []


def test_penalties_of_one_draw_do_not_reach_the_next() -> None:
    params = replace(GREEDY, frequency_penalty=2.0, repetition_penalty=2.0)
    rows = torch.tensor([[2.0, 1.5, 1.0]] * 4)
    draws = [draw_of(params, prompt=[1], output=[0]), draw_of(params, prompt=[2])]
    draws = [replace(draw, draft_tokens=(1,)) for draw in draws]
    assert [tokens_of(own) for own in draw_all(rows, draws)] == [(2,), (0,)]


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    assert one([1.0, 3.0, 3.0, 2.0], draw_of(GREEDY)) == 1


def test_greedy_ignores_what_only_filters() -> None:
    params = replace(GREEDY, top_k=1, top_p=0.1, min_p=0.9, seed=4)
    assert one([1.0, 3.0, 3.5, 2.0], draw_of(params)) == 2


def test_top_k_keeps_exactly_k_and_the_lowest_ids_of_equals() -> None:
    assert reachable([0.0, 1.0, 0.0, 1.0, 1.0, 0.0], SamplingParams(top_k=2)) == {1, 3}
    assert reachable([0.0, 1.0, 0.0, 1.0, 1.0, 0.0], SamplingParams(top_k=4)) == {0, 1, 3, 4}


def test_top_p_keeps_the_shortest_prefix_that_reaches_its_mass() -> None:
    logits = [math.log(p) for p in (0.125, 0.5, 0.125, 0.25)]
    assert reachable(logits, SamplingParams(top_p=0.45)) == {1}
    assert reachable(logits, SamplingParams(top_p=0.7)) == {1, 3}
    assert reachable(logits, SamplingParams(top_p=0.8)) == {0, 1, 3}
    assert reachable(logits, SamplingParams(top_p=0.9)) == {0, 1, 2, 3}


def test_top_p_keeps_at_least_one_token() -> None:
    assert reachable([0.0] * 5, SamplingParams(top_p=1e-9), draws=40) == {0}


def test_min_p_is_relative_to_the_largest_probability() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.19, 0.11)]
    assert reachable(logits, SamplingParams(min_p=0.5)) == {0, 1}
    assert reachable([2.0, 2.0, 1.0], SamplingParams(min_p=1.0)) == {0, 1}


def test_top_p_is_taken_of_what_top_k_left() -> None:
    logits = [math.log(p) for p in (0.3, 0.3, 0.2, 0.2)]
    assert reachable(logits, SamplingParams(top_k=2, top_p=0.49)) == {0}
    assert reachable(logits, SamplingParams(top_p=0.49)) == {0, 1}


def test_repetition_penalty_counts_the_prompt_and_divides_or_multiplies_by_sign() -> None:
    params = replace(GREEDY, repetition_penalty=2.0)
    assert one([3.0, 2.0, -5.0], draw_of(params, prompt=[0])) == 1
    assert one([3.0, 2.0, -5.0], draw_of(params, prompt=[1])) == 0
    assert one([-3.0, -2.0, -5.0], draw_of(params, prompt=[1])) == 0


class CountedToken:
    """A token that counts how often it is converted."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.conversions = 0

    def __index__(self) -> int:
        self.conversions += 1
        return self.token


def test_a_history_that_grows_is_converted_once() -> None:
    rng = np.random.default_rng(4)
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2, seed=3)
    counted = [CountedToken(int(token)) for token in rng.integers(0, 40, size=30)]
    history = GrowingTokens(cast("list[int]", counted[:20]))
    for length in (20, 20, 21, 30):
        history.extend(cast("list[int]", counted[len(history) : length]))
        row = torch.from_numpy(rng.normal(size=(1, 40)).astype(np.float32))
        tokens = tuple(one.token for one in counted[:length])
        draw = Draw(params, tokens, 9, frozenset(), 0)
        assert sample(row, replace(draw, history=history)) == sample(row, draw)
    assert [one.conversions for one in counted] == [1] * 30


@pytest.mark.parametrize("penalty", ["frequency_penalty", "presence_penalty"])
def test_frequency_and_presence_penalty_count_the_output_alone(penalty: str) -> None:
    values: dict[str, Any] = {penalty: 1.5}
    params = replace(GREEDY, **values)
    assert one([3.0, 2.0], draw_of(params, prompt=[0, 0])) == 0
    assert one([3.0, 2.0], draw_of(params, prompt=[1], output=[0])) == 1


@pytest.mark.parametrize("largest", [30.0, 1e6, 1e36])
@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1.0])
def test_the_least_repetition_penalty_leaves_a_token(largest: float, temperature: float) -> None:
    params = SamplingParams(temperature, repetition_penalty=MIN_REPETITION_PENALTY)
    params.validate(vocab_size=3)
    assert one([largest, -largest, 0.0], draw_of(params, [0, 1, 2])) == 0


def test_frequency_penalty_counts_and_presence_penalty_does_not() -> None:
    twice = [1, 1]
    assert one([1.0, 3.5], draw_of(replace(GREEDY, presence_penalty=1.5), output=twice)) == 1
    assert one([1.0, 3.5], draw_of(replace(GREEDY, frequency_penalty=1.5), output=twice)) == 0


def test_every_row_has_the_history_of_its_own_position() -> None:
    params = replace(GREEDY, frequency_penalty=1.0)
    logits = torch.tensor([[2.5, 1.9, 1.0]] * 5)
    # 0 (now 1.5), 1 (0.9), 0 (0.5), 2 (0.0), 1 (-0.1)
    assert sample(logits, draw_of(params), [0, 1, 0, 2]) == [0, 1, 0, 2, 1]


def test_ends_with_the_first_disagreement() -> None:
    logits = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    assert sample(logits, draw_of(GREEDY), [1, 1]) == [1, 0]
    assert sample(logits, draw_of(GREEDY), [1, 0]) == [1, 0, 1]


def test_min_tokens_masks_stop_tokens_until_enough_are_out() -> None:
    logits = torch.tensor([[0.0, 1.0, 5.0]] * 4)
    draw = draw_of(GREEDY, output=[0], stops=[2], min_tokens=3)
    assert sample(logits, draw, [1, 1, 2]) == [1, 1, 2, 2]


def test_logit_bias_is_added() -> None:
    assert one([0.0, 5.0, 0.0], draw_of(replace(GREEDY, logit_bias={1: -100.0, 2: 0.5}))) == 2


def test_ids_beyond_the_logits_are_ignored() -> None:
    params = replace(GREEDY, frequency_penalty=1.0, repetition_penalty=1.1, logit_bias={90: 2.0})
    draw = draw_of(params, prompt=[0, 99], output=[77], stops=[98], min_tokens=9)
    assert sample(torch.tensor([[0.0, 1.0]] * 2), draw, [1234]) == [1]


@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-12])
def test_the_coldest_temperatures_are_greedy(temperature: float) -> None:
    assert reachable([1.0, 2.0, 1.99], SamplingParams(temperature=temperature), draws=50) == {1}


def test_the_hottest_temperature_is_uniform_over_what_is_possible() -> None:
    params = SamplingParams(temperature=1.7e308)
    assert reachable([1.0, 200.0, -200.0, -math.inf], params) == {0, 1, 2}


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(), SamplingParams(top_p=0.5, presence_penalty=1.0)]
)
@pytest.mark.parametrize("bad", [[1.0, math.nan], [-math.inf, -math.inf], [math.inf, 0.0]])
def test_logits_without_a_finite_maximum_raise_broken(params: SamplingParams, bad: list[float]) -> None:
    with pytest.raises(Broken, match="position 3"):
        one(bad, draw_of(params, prompt=[0, 1, 1]))


def test_a_mask_that_leaves_no_token_raises_broken() -> None:
    with pytest.raises(Broken, match="position 1"):
        one([1.0, 2.0], draw_of(SamplingParams(), stops=[0, 1], min_tokens=1))


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=3), SamplingParams(top_p=0.4)])
def test_only_allowed_tokens_are_drawn(params: SamplingParams) -> None:
    rows = torch.tensor([[9.0, 1.0, 8.0], [9.0, 7.0, 1.0]])
    draw = allowing(replace(draw_of(params), draft_tokens=(1,)), [{1}, {2}], 3)
    assert tokens_of(draw_all(rows, [draw])[0]) == (1, 2)


def test_a_bias_makes_no_forbidden_token_possible() -> None:
    draw = allowing(draw_of(replace(GREEDY, logit_bias={0: 100.0})), [{1, 2}], 3)
    assert tokens_of(draw_all(torch.tensor([[5.0, 1.0, 2.0]]), [draw])[0]) == (2,)


def test_tokens_beyond_the_masks_are_not_allowed() -> None:
    draw = allowing(draw_of(GREEDY), [range(32)], 32)
    rows = torch.arange(40.0)[None]
    assert tokens_of(draw_all(rows, [draw])[0]) == (31,)


def test_a_mask_is_of_its_own_draw_and_row() -> None:
    rows = torch.arange(40.0).repeat(4, 1)
    first = allowing(replace(draw_of(GREEDY), draft_tokens=(3,)), [{3}, {4}], 40)
    draws = [first, draw_of(GREEDY), allowing(draw_of(GREEDY), [{35, 6}], 40)]
    assert [tokens_of(outcome) for outcome in draw_all(rows, draws)] == [(3, 4), (39,), (35,)]


def test_logprobs_are_those_before_the_mask() -> None:
    rows = torch.tensor([[3.0, 2.0, 1.0]])
    entry = listed(rows, allowing(draw_of(GREEDY), [{2}], 3), top=1)[0]
    assert entry.logprob == pytest.approx(torch.log_softmax(rows, -1)[0, 2].item(), abs=1e-6)
    assert entry.top[0][0] == 0


def test_masks_for_other_rows_than_those_of_the_draw_are_refused() -> None:
    with pytest.raises(Broken, match="allowed: must have 2 rows, got 1"):
        sample(torch.zeros(2, 3), allowing(draw_of(GREEDY), [{1}], 3), [1])


def test_a_row_that_is_not_needed_may_hold_anything() -> None:
    logits = torch.tensor([[0.0, 1.0], [math.nan, math.nan]])
    assert sample(logits, draw_of(GREEDY), [0]) == [1]
    with pytest.raises(Broken):
        sample(logits[1:], draw_of(GREEDY))


@pytest.mark.parametrize(("rows", "guesses"), [(0, []), (2, []), (4, [1, 1]), (2, [1, 1])])
def test_a_wrong_number_of_rows_is_refused(rows: int, guesses: list[int]) -> None:
    with pytest.raises(Broken, match=f"got {rows}$"):
        sample(torch.zeros(rows, 3), draw_of(GREEDY), guesses)


def test_logits_are_left_as_they_were() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    params = SamplingParams(top_k=1, top_p=0.5, min_p=0.5, frequency_penalty=1.0, logit_bias={0: 1.0})
    sample(logits, draw_of(params, output=[0], stops=[1], min_tokens=4))
    assert logits.tolist() == [[3.0, 2.0, 1.0]]


def listed(logits: torch.Tensor, draw: Draw, top: int) -> tuple[PositionLogprobs, ...]:
    (outcome,) = draw_all(logits, [replace(draw, logprobs=top)])
    if not isinstance(outcome, Sampled):
        raise outcome
    return outcome.logprobs


def test_logprobs_are_of_the_models_own_distribution() -> None:
    rows = torch.from_numpy(np.random.default_rng(3).normal(size=(3, 500)).astype(np.float32) * 5)
    truth = torch.log_softmax(rows.double(), dim=-1)
    params = replace(GREEDY, logit_bias={7: 100.0}, frequency_penalty=1.0)
    answers = listed(rows, replace(draw_of(params), draft_tokens=(7, 8)), top=4)
    assert len(answers) == 2
    for row, token, answer in zip(truth, [7, 7], answers, strict=False):
        best = row.topk(4)
        assert answer.logprob == pytest.approx(float(row[token]), abs=1e-5)
        assert [i for i, _ in answer.top] == best.indices.tolist()
        assert [x for _, x in answer.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_logprobs_list_equals_by_id() -> None:
    (answer,) = listed(torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0]]), draw_of(GREEDY), top=4)
    assert [i for i, _ in answer.top] == [1, 2, 4, 0]


@pytest.mark.parametrize(("top", "count"), [(0, 0), (3, 3), (9, 3)])
def test_logprobs_lists_as_many_as_there_are(top: int, count: int) -> None:
    (answer,) = listed(torch.tensor([[0.0, -math.inf, 1.0]]), draw_of(GREEDY), top)
    assert len(answer.top) == count
    assert answer.logprob == pytest.approx(-math.log(1 + math.exp(-1)))


def test_logprobs_of_a_masked_nan_raise_broken() -> None:
    draw = draw_of(GREEDY, stops=[1], min_tokens=1)
    assert sample(torch.tensor([[0.0, math.nan]]), draw) == [0]
    with pytest.raises(Broken, match="position 1:"):
        listed(torch.tensor([[0.0, math.nan]]), draw, 1)
