"""Sampling against a naive reference, its tie rules, its history rules, and its refusals."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core import noise
from services.core.errors import Broken
from services.core.params import SamplingParams
from services.engine import noise as torch_noise
from services.engine.sampling import SamplingContext, logprobs, sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

GREEDY = SamplingParams(temperature=0.0)
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def context_of(
    params: SamplingParams,
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
    stops: Sequence[int] = (),
    min_tokens: int = 0,
) -> SamplingContext:
    return SamplingContext(params, [*prompt, *output], len(prompt), frozenset(stops), min_tokens)


def one(logits: Sequence[float], context: SamplingContext) -> int:
    (token,) = sample(torch.tensor([logits], dtype=torch.float32), context, ())
    return token


def reachable(logits: Sequence[float], params: SamplingParams, draws: int = 400) -> set[int]:
    """The tokens that some seed draws."""
    return {one(logits, context_of(replace(params, seed=seed))) for seed in range(draws)}


# ------------------------------------------------------------------------------------- reference --


def reference(row: Sequence[float], context: SamplingContext, guesses: Sequence[int]) -> int:
    """The token after `guesses`, in plain Python over the whole vocabulary, in the order of the proto."""
    params, vocab = context.params, len(row)
    output = [*context.tokens[context.prompt_len :], *guesses]
    seen = {*context.tokens, *guesses}
    logits = [x + params.logit_bias.get(v, 0.0) for v, x in enumerate(row)]
    if len(output) < context.min_tokens:
        logits = [-math.inf if v in context.stop_token_ids else x for v, x in enumerate(logits)]
    for v in range(vocab):
        if v in seen:
            over = logits[v] > 0
            logits[v] *= 1 / params.repetition_penalty if over else params.repetition_penalty
        logits[v] -= params.frequency_penalty * output.count(v) + params.presence_penalty * (v in output)
    if params.temperature == 0.0:
        return logits.index(max(logits))
    scaled = [x / params.temperature for x in logits]
    kept = sorted(range(vocab), key=lambda v: (-scaled[v], v))[: params.top_k or vocab]
    kept = _nucleus(kept, scaled, params.top_p)
    kept = [v for v in kept if math.exp(scaled[v] - scaled[kept[0]]) >= params.min_p]
    position = len(context.tokens) + len(guesses)
    g = noise.gumbel(noise.words(params.seed, position, range(vocab)))
    return min(kept, key=lambda v: (-(scaled[v] + float(g[v])), v))


def _nucleus(ranked: list[int], scaled: list[float], top_p: float) -> list[int]:
    weights = [math.exp(scaled[v] - scaled[ranked[0]]) for v in ranked]
    mass, size = 0.0, 0
    while size < len(ranked) and mass < top_p * sum(weights):
        mass += weights[size]
        size += 1
    return ranked[: max(1, size)]


@dataclass(frozen=True)
class Case:
    rows: NDArray[np.float32]
    context: SamplingContext
    guesses: list[int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
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
    context = context_of(params, prompt, output, stops, draw(st.integers(0, 8)))
    return Case(rows, context, _guesses(rows, context, spoil=draw(st.booleans())))


def _guesses(rows: NDArray[np.float32], context: SamplingContext, *, spoil: bool) -> list[int]:
    """Right guesses; the last of them wrong if `spoil`."""
    guesses: list[int] = []
    for row in rows[:-1]:
        guesses.append(reference([float(x) for x in row], context, guesses))
    if guesses and spoil:
        guesses[-1] = (guesses[-1] + 1) % rows.shape[1]
    return guesses


@settings(max_examples=400, derandomize=True, deadline=None)
@given(cases())
def test_is_what_the_naive_reference_says_at_every_position(case: Case) -> None:
    got = sample(torch.from_numpy(case.rows), case.context, case.guesses)
    expected = []
    for i, row in enumerate(case.rows):
        expected.append(reference([float(x) for x in row], case.context, case.guesses[:i]))
        if case.guesses[i : i + 1] not in ([], [expected[i]]):
            break
    assert got == expected


@pytest.mark.parametrize("spread", [0.0, 0.05, 1.0, 4.0, 40.0])
@pytest.mark.parametrize("vocab", [4, 1021, 49152])
def test_pruning_never_changes_the_winner(vocab: int, spread: float) -> None:
    """Against noise for the whole vocabulary; float32 logits, so that the scores are the same to the bit."""
    rng = np.random.default_rng(vocab)
    for position in range(1, 13):
        row = (rng.normal(size=vocab) * spread).astype(np.float32)
        context = context_of(SamplingParams(seed=5), prompt=[0] * position)
        shifted = (row - row.max()).astype(np.float64)
        scores = shifted + noise.gumbel(noise.words(5, position, range(vocab)))
        assert sample(torch.from_numpy(row[None]), context, ()) == [int(scores.argmax())]


def test_a_row_does_not_depend_on_its_company() -> None:
    rng = np.random.default_rng(2)
    rows = torch.from_numpy(rng.normal(size=(6, 999)).astype(np.float32) * 4)
    params = SamplingParams(temperature=0.8, top_p=0.95, top_k=300, frequency_penalty=0.5, seed=9)
    alone: list[int] = []
    for i in range(6):
        alone += sample(rows[i : i + 1].clone(), context_of(params, output=alone), ())
    assert sample(rows, context_of(params), alone[:5]) == alone


# ------------------------------------------------------------------------------------------ ties --


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    assert one([1.0, 3.0, 3.0, 2.0], context_of(GREEDY)) == 1


def test_greedy_ignores_what_only_filters() -> None:
    params = replace(GREEDY, top_k=1, top_p=0.1, min_p=0.9, seed=4)
    assert one([1.0, 3.0, 3.5, 2.0], context_of(params)) == 2


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


# --------------------------------------------------------------------------------------- history --


def test_repetition_penalty_counts_the_prompt_and_divides_or_multiplies_by_sign() -> None:
    params = replace(GREEDY, repetition_penalty=2.0)
    assert one([3.0, 2.0, -5.0], context_of(params, prompt=[0])) == 1
    assert one([3.0, 2.0, -5.0], context_of(params, prompt=[1])) == 0
    assert one([-3.0, -2.0, -5.0], context_of(params, prompt=[1])) == 0


@pytest.mark.parametrize("penalty", ["frequency_penalty", "presence_penalty"])
def test_frequency_and_presence_penalty_count_the_output_alone(penalty: str) -> None:
    values: dict[str, Any] = {penalty: 1.5}
    params = replace(GREEDY, **values)
    assert one([3.0, 2.0], context_of(params, prompt=[0, 0])) == 0
    assert one([3.0, 2.0], context_of(params, prompt=[1], output=[0])) == 1


def test_frequency_penalty_counts_and_presence_penalty_does_not() -> None:
    twice = [1, 1]
    assert one([1.0, 3.5], context_of(replace(GREEDY, presence_penalty=1.5), output=twice)) == 1
    assert one([1.0, 3.5], context_of(replace(GREEDY, frequency_penalty=1.5), output=twice)) == 0


def test_every_row_has_the_history_of_its_own_position() -> None:
    """Accepted guesses count towards the penalties of the rows that follow them."""
    params = replace(GREEDY, frequency_penalty=1.0)
    logits = torch.tensor([[2.5, 1.9, 1.0]] * 5)
    # 0 (now 1.5), 1 (0.9), 0 (0.5), 2 (0.0), 1 (-0.1)
    assert sample(logits, context_of(params), [0, 1, 0, 2]) == [0, 1, 0, 2, 1]


def test_ends_with_the_first_disagreement() -> None:
    logits = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    assert sample(logits, context_of(GREEDY), [1, 1]) == [1, 0]
    assert sample(logits, context_of(GREEDY), [1, 0]) == [1, 0, 1]
    assert sample(logits[:2], context_of(GREEDY), [1, 0, 1, 1]) == [1, 0]


def test_min_tokens_masks_stop_tokens_until_enough_are_out() -> None:
    logits = torch.tensor([[0.0, 1.0, 5.0]] * 4)
    context = context_of(GREEDY, output=[0], stops=[2], min_tokens=3)
    assert sample(logits, context, [1, 1, 2]) == [1, 1, 2, 2]


def test_logit_bias_is_added() -> None:
    assert one([0.0, 5.0, 0.0], context_of(replace(GREEDY, logit_bias={1: -100.0, 2: 0.5}))) == 2


def test_ids_beyond_these_logits_are_no_history() -> None:
    """A draft's vocabulary may be padded otherwise than the target's, and a guess may be anything."""
    params = replace(GREEDY, frequency_penalty=1.0, repetition_penalty=1.1, logit_bias={90: 2.0})
    context = context_of(params, prompt=[0, 99], output=[77], stops=[98], min_tokens=9)
    assert sample(torch.tensor([[0.0, 1.0]] * 2), context, [1234]) == [1]


# ------------------------------------------------------------------------------ extremes, refusals --


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
def test_logits_without_a_finite_maximum_are_our_fault(params: SamplingParams, bad: list[float]) -> None:
    with pytest.raises(Broken, match="position 3"):
        one(bad, context_of(params, prompt=[0, 1, 1]))


def test_a_mask_that_leaves_nothing_is_our_fault() -> None:
    with pytest.raises(Broken, match="position 1"):
        one([1.0, 2.0], context_of(SamplingParams(), stops=[0, 1], min_tokens=1))


def test_a_row_that_is_not_needed_may_hold_anything() -> None:
    logits = torch.tensor([[0.0, 1.0], [math.nan, math.nan]])
    assert sample(logits, context_of(GREEDY), [0]) == [1]
    with pytest.raises(Broken):
        sample(logits, context_of(GREEDY), [1])


@pytest.mark.parametrize(("rows", "guesses"), [(0, []), (2, []), (4, [1, 1])])
def test_rows_without_a_history_are_refused(rows: int, guesses: list[int]) -> None:
    with pytest.raises(Broken, match=f"{rows} rows"):
        sample(torch.zeros(rows, 3), context_of(GREEDY), guesses)


def test_logits_are_left_as_they_were() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    params = SamplingParams(top_k=1, top_p=0.5, min_p=0.5, frequency_penalty=1.0, logit_bias={0: 1.0})
    sample(logits, context_of(params, output=[0], stops=[1], min_tokens=4), ())
    assert logits.tolist() == [[3.0, 2.0, 1.0]]


# -------------------------------------------------------------------------------------- logprobs --


def test_logprobs_are_of_the_models_own_distribution() -> None:
    rows = torch.from_numpy(np.random.default_rng(3).normal(size=(3, 500)).astype(np.float32) * 5)
    expected = torch.log_softmax(rows.double(), dim=-1)
    answers = logprobs(rows, [7, 8], top=4)
    assert len(answers) == 2
    for row, token, answer in zip(expected, [7, 8], answers, strict=False):
        best = row.topk(4)
        assert answer.logprob == pytest.approx(float(row[token]), abs=1e-5)
        assert [i for i, _ in answer.top] == best.indices.tolist()
        assert [x for _, x in answer.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_logprobs_list_equals_by_id() -> None:
    (answer,) = logprobs(torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0]]), [0], top=4)
    assert [i for i, _ in answer.top] == [1, 2, 4, 0]


@pytest.mark.parametrize(("top", "listed"), [(0, 0), (3, 3), (9, 3)])
def test_logprobs_lists_as_many_as_there_are(top: int, listed: int) -> None:
    (answer,) = logprobs(torch.tensor([[0.0, -math.inf, 1.0]]), [2], top)
    assert len(answer.top) == listed
    assert answer.logprob == pytest.approx(-math.log(1 + math.exp(-1)))


def test_logprobs_of_a_nan_are_our_fault() -> None:
    with pytest.raises(Broken):
        logprobs(torch.tensor([[0.0, math.nan]]), [0], 1)


# --------------------------------------------------------------------------------- noise in torch --


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("seed", "position"), [(0, 0), (2**64 - 1, 2**40 + 3), (0x9E3779B97F4A7C15, 4095)])
def test_torch_words_are_the_same_to_the_bit(device: str, seed: int, position: int) -> None:
    tokens = np.concatenate((np.arange(5000), [2**31, 2**32 + 1, 2**34 - 1]))
    got = torch_noise.words(seed, position, torch.from_numpy(tokens).to(device)).cpu()
    assert got.tolist() == noise.words(seed, position, tokens).tolist()
    spoil = torch_noise.words(seed, position, torch.from_numpy(tokens).to(device), noise.SPOIL).cpu()
    assert spoil.tolist() == noise.words(seed, position, tokens, noise.SPOIL).tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_torch_noise_agrees_to_a_millionth(device: str) -> None:
    of_words = np.concatenate(([0, 2**32 - 1], noise.words(1, 2, range(5000)))).astype(np.uint32)
    got = torch_noise.gumbel(torch.from_numpy(of_words.astype(np.int64)).to(device)).cpu().numpy()
    np.testing.assert_allclose(got, noise.gumbel(of_words), rtol=0, atol=1e-6)
