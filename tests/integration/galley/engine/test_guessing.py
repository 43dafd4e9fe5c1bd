"""What a draft guesses of the columns that its head knows is what sampling draws of the whole vocabulary."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from galley.core.errors import Broken, GalleyError
from galley.core.noise import gumbel, words
from galley.core.sampling_params import SamplingParams
from galley.core.step import Draw, Sampled
from galley.engine.load.draft_directory import ReducedHead
from galley.engine.sampler import draw_all, guess, list_tokens
from galley.engine.sampling.allowed import constrain
from galley.engine.sampling.guessing import LISTED, SOFTNESS, ListOutcome
from tests.integration.galley.engine.sampling_reference import allowing

VOCAB = 700


def head_of(columns: int, seed: int) -> ReducedHead:
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))
    return ReducedHead(order[:columns].sort().values, VOCAB)


def draw(position: int = 5, **params: Any) -> Draw:
    return Draw(SamplingParams(**params), [1] * position, 2, frozenset({3}), 0)


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 4.0]),
        "top_k": st.sampled_from([0, 1, 7, 1000]),
        "top_p": st.sampled_from([1.0, 0.9, 0.3]),
        "min_p": st.sampled_from([0.0, 0.05]),
        "seed": st.integers(0, 2**64 - 1),
    }
)


@settings(max_examples=60)
@given(
    st.lists(PARAMS, min_size=1, max_size=5),
    st.integers(1, VOCAB),
    st.integers(0, 2**20),
    st.sampled_from([0.1, 1.0, 8.0]),
    st.sampled_from([0, 1, 90]),
)
def test_a_guess_equals_a_draw_from_the_whole_vocabulary(
    params: list[dict[str, Any]], columns: int, position: int, spread: float, masked: int
) -> None:
    head = head_of(columns, position)
    normal = torch.randn(len(params), columns, generator=torch.Generator().manual_seed(columns))
    logits = normal * spread
    draws = [
        Draw(SamplingParams(**one), range(position + index), 0, frozenset(), 0)
        for index, one in enumerate(params)
    ]
    if masked:
        numbers = random.Random(position)
        draws = [allowing(one, [numbers.sample(range(VOCAB), masked)], VOCAB) for one in draws]
    outcomes, confidences = guess(logits, draws, head)
    whole = head.spread(logits)
    assert [str(outcome) for outcome in outcomes] == [str(outcome) for outcome in draw_all(whole, draws)]
    drawn = [index for index, outcome in enumerate(outcomes) if isinstance(outcome, Sampled)]
    highest = torch.softmax(constrain(whole, draws, range(len(draws))), -1).amax(-1)
    assert [confidences[i] for i in drawn] == pytest.approx([float(highest[i]) for i in drawn], rel=1e-5)


def listed(outcomes: Sequence[ListOutcome]) -> list[list[int]]:
    return [
        [] if isinstance(outcome, GalleyError) else [token for token, _ in outcome] for outcome in outcomes
    ]


@settings(max_examples=60)
@given(
    st.lists(PARAMS, min_size=1, max_size=5),
    st.integers(1, VOCAB),
    st.integers(0, 2**20),
    st.sampled_from([0.1, 1.0, 8.0]),
    st.sampled_from([0, 1, 90]),
    st.integers(1, 8),
)
def test_a_list_begins_with_the_guess_and_goes_on_by_logit_and_noise(
    params: list[dict[str, Any]], columns: int, position: int, spread: float, masked: int, count: int
) -> None:
    head = head_of(columns, position)
    normal = torch.randn(len(params), columns, generator=torch.Generator().manual_seed(columns))
    logits = normal * spread
    draws = [
        Draw(SamplingParams(**one), range(position + index), 0, frozenset(), 0)
        for index, one in enumerate(params)
    ]
    if masked:
        numbers = random.Random(position)
        draws = [allowing(one, [numbers.sample(range(VOCAB), masked)], VOCAB) for one in draws]
    found = list_tokens(logits, draws, head, count)
    first = [
        list(outcome.tokens) if isinstance(outcome, Sampled) else []
        for outcome in guess(logits, draws, head)[0]
    ]
    assert [tokens[:1] for tokens in listed(found)] == first
    allowed = constrain(head.spread(logits), draws, range(len(draws)))
    for row, draw_of, tokens in zip(allowed, draws, listed(found), strict=True):
        params_of = draw_of.params
        if params_of.top_k == 0 and params_of.top_p == 1.0 and params_of.min_p == 0.0:
            scores = row.double()
            if params_of.temperature:
                noise = gumbel(words(params_of.seed, len(draw_of.history), range(VOCAB)))
                scores = scores / params_of.temperature + torch.from_numpy(noise)
            finite = int(scores.isfinite().sum())
            assert len(tokens) == min(count, finite)
            assert scores[tokens].tolist() == pytest.approx(
                scores.topk(len(tokens)).values.tolist(), abs=1e-4
            )
        elif params_of.top_k and params_of.temperature:
            assert len(tokens) <= params_of.top_k
        assert row[tokens].isfinite().all()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("path", [{}, {"logit_bias": {5: 0.0}}], ids=["plain", "biased"])
def test_weights_of_a_list_say_how_near_its_candidates_are(temperature: float, path: dict[str, Any]) -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(6))
    own = draw(temperature=temperature, seed=4, **path)
    (outcome,) = list_tokens(logits, [own], None, LISTED)
    assert not isinstance(outcome, GalleyError)
    tokens, weights = zip(*outcome, strict=True)
    if temperature:
        noise = gumbel(words(4, len(own.history), tokens))
        scores = logits[0, list(tokens)].double() / temperature + torch.from_numpy(noise)
        assert list(scores) == sorted(scores, reverse=True)
        shares = torch.softmax(scores / SOFTNESS, 0)
    else:
        shares = torch.softmax(logits[0].double(), 0)[list(tokens)]
    assert weights == pytest.approx(shares.tolist(), abs=1e-5)


@pytest.mark.parametrize("logprobs", [None, 0])
def test_a_guess_is_an_allowed_token_with_its_share_of_the_allowed_ones(logprobs: int | None) -> None:
    """Logprobs take the path of draws that are not plain."""
    head = head_of(VOCAB, 3)
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 50.0
    own = allowing(replace(draw(temperature=0.0), logprobs=logprobs), [{7, 600}], VOCAB)
    outcomes, confidences = guess(logits, [own], head)
    assert isinstance(outcomes[0], Sampled)
    assert outcomes[0].tokens == (7,)
    assert confidences == pytest.approx([0.5])


def test_draws_with_history_use_the_whole_vocabulary() -> None:
    head = head_of(200, 1)
    logits = torch.randn(4, 200, generator=torch.Generator().manual_seed(3))
    best = int(head.tokens[logits[0].argmax()])
    draws = [
        draw(logit_bias={best: -100.0}),
        draw(repetition_penalty=1.5, temperature=1.0),
        Draw(SamplingParams(), [1] * 5, 5, frozenset({int(head.tokens[logits[2].argmax()])}), 3),
        draw(temperature=0.8, seed=9),
    ]
    outcomes, confidences = guess(logits, draws, head)
    assert outcomes == draw_all(head.spread(logits), draws)
    assert isinstance(outcomes[0], Sampled)
    assert outcomes[0].tokens != (best,)
    assert confidences == pytest.approx(torch.softmax(logits, -1).amax(-1).tolist())
    lists = listed(list_tokens(logits, draws, head, 4))
    assert [tokens[:1] for tokens in lists] == [
        list(outcome.tokens) for outcome in outcomes if isinstance(outcome, Sampled)
    ]
    assert all(len(set(tokens)) == len(tokens) >= 3 for tokens in lists)
    assert draws[2].stop_token_ids.isdisjoint(lists[2])


def test_a_model_that_knows_all_tokens_needs_no_head() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4))
    draws = [draw(temperature=1.0, seed=seed) for seed in range(3)]
    assert guess(logits, draws, None)[0] == draw_all(logits, draws)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_row_fails_its_own_guess(bad: float, temperature: float) -> None:
    head = head_of(100, 2)
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(5))
    logits[1, 50] = bad
    draws = [draw(temperature=temperature, seed=seed) for seed in range(3)]
    outcomes, _ = guess(logits, draws, head)
    assert isinstance(outcomes[1], Broken)
    assert [outcomes[0], outcomes[2]] == draw_all(head.spread(logits[[0, 2]]), [draws[0], draws[2]])
    lists = list_tokens(logits, draws, head, 3)
    assert isinstance(lists[1], Broken)
    assert [len(tokens) for tokens in listed(lists)] == [3, 0, 3]
