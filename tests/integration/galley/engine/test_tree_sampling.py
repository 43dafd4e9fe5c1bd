"""Sampling along a tree of draft tokens: by the host's kernels and as a GPU does it, against a plain walk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from galley.core.errors import Broken, GalleyError
from galley.core.sampling_params import SamplingParams
from galley.core.step import Draw, Sampled
from galley.core.trees import follow, path_to, valid_count
from galley.engine.cuda import sampling as device_sampling
from galley.engine.sampler import draw_all
from tests.integration.galley.engine.sampling_reference import Floats, allowing, choose, expected

SHAPES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"top_k": 50},
    {"top_p": 0.92},
    {"min_p": 0.02},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.7, "min_p": 0.001},
    {"frequency_penalty": 0.6, "presence_penalty": -0.3, "repetition_penalty": 1.2},
    {"temperature": 0.0, "frequency_penalty": 1.1, "repetition_penalty": 0.8},
    {"logit_bias": {3: 7.5, 5: -100.0}},
]


def a_draw(rng: np.random.Generator, rows: Floats, shape: dict[str, Any]) -> Draw:
    """Return a draw with a random history, masks of stop tokens and of a grammar, and logprobs."""
    vocab = rows.shape[1]
    history = rng.integers(0, vocab + 3, size=int(rng.integers(1, 30))).tolist()
    draw = Draw(
        replace(SamplingParams(seed=int(rng.integers(0, 2**63))), **shape),
        history,
        prompt_len=int(rng.integers(1, len(history) + 1)),
        stop_token_ids=frozenset(rng.integers(0, vocab, size=vocab // 8).tolist()),
        min_tokens=int(rng.choice([0, len(history), len(history) + 2])),
        logprobs=[None, 0, 5][int(rng.integers(0, 3))],
    )
    share = rng.choice([0.0, 0.05, 0.5])
    if share == 0.0:
        return draw
    return allowing(draw, [np.flatnonzero(rng.random(vocab) <= share).tolist() for _ in rows], vocab)


def some_rows(rng: np.random.Generator, vocab: int) -> Floats:
    rows: Floats = rng.normal(size=(int(rng.integers(1, 13)), vocab)).astype(np.float32)
    rows *= np.float32(rng.choice([0.0, 0.5, 3.0]))
    if rng.random() < 0.2:
        rows[rng.integers(len(rows))] = rng.choice([-np.inf, np.nan, np.inf])
    return rows


def with_tree(rng: np.random.Generator, rows: Floats, draw: Draw) -> Draw:
    """Return the draw with a random tree, most of whose tokens are right if those before them are."""
    tokens: list[int] = []
    parents: list[int] = []
    while len(tokens) < len(rows) - 1:
        parent = len(tokens) - 1 - min(int(rng.geometric(0.4)) - 1, len(tokens))
        siblings = {tokens[node] for node in range(len(tokens)) if parents[node] == parent}
        right = choose(rows, parent + 1, draw, [tokens[node] for node in path_to(parents, parent)])
        token = int(rng.integers(rows.shape[1])) if right is None or rng.random() < 0.3 else right
        if token not in siblings:
            tokens.append(token)
            parents.append(parent)
    assert valid_count(tokens, parents) == len(tokens)
    return replace(draw, draft_tokens=tuple(tokens), parents=tuple(parents))


def both(rows: Floats, draws: Sequence[Draw]) -> list[Sampled | GalleyError]:
    """Return the outcomes of the host, which the device's must equal."""
    logits = torch.from_numpy(rows)
    outcomes = draw_all(logits, draws)
    device = device_sampling.draw_all(logits, draws)
    assert [str(outcome) for outcome in device] == [str(outcome) for outcome in outcomes]
    return outcomes


@pytest.mark.parametrize(("vocab", "times"), [(7, 60), (130, 25), (1021, 3)])
def test_a_draw_walks_its_tree(vocab: int, times: int) -> None:
    rng = np.random.default_rng(vocab)
    shapes = [shape for shape in SHAPES for _ in range(times)]
    rows = [some_rows(rng, vocab) for _ in shapes]
    draws = [with_tree(rng, own, a_draw(rng, own, shape)) for own, shape in zip(rows, shapes, strict=True)]
    sides = 0
    for outcome, own, draw in zip(both(np.concatenate(rows), draws), rows, draws, strict=True):
        answer = expected(own, draw)
        if answer is None:
            assert isinstance(outcome, Broken)
            continue
        assert isinstance(outcome, Sampled)
        assert outcome.tokens == answer.tokens
        assert [[i for i, _ in entry.top] for entry in outcome.logprobs] == [
            [i for i, _ in entry.top] for entry in answer.logprobs
        ]
        assert [entry.logprob for entry in outcome.logprobs] == pytest.approx(
            [entry.logprob for entry in answer.logprobs], abs=1e-5
        )
        path = follow(draw.draft_tokens, draw.parents, outcome.tokens)
        sides += path != list(range(len(path)))
    assert sides > len(draws) / 10, "many accepted paths leave the first nodes"


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_off_the_path_may_hold_anything(shape: dict[str, Any]) -> None:
    rng = np.random.default_rng(3)
    for _ in range(5):
        rows = rng.normal(size=(9, 60)).astype(np.float32)
        draw = with_tree(rng, rows, a_draw(rng, rows, shape))
        (whole,) = both(rows, [draw])
        assert isinstance(whole, Sampled)
        path = follow(draw.draft_tokens, draw.parents, whole.tokens)
        needed = [0, *(node + 1 for node in path)]
        rows[[row for row in range(len(rows)) if row not in needed]] = math.nan
        assert both(rows, [draw]) == [whole]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_chain_with_parents_is_a_chain(shape: dict[str, Any]) -> None:
    rng = np.random.default_rng(4)
    for _ in range(10):
        rows = rng.normal(size=(5, 60)).astype(np.float32)
        draw = a_draw(rng, rows, shape)
        answer = expected(rows[:1], replace(draw, allowed=None, logprobs=None))
        assert answer is not None
        chain = replace(draw, draft_tokens=(*answer.tokens, 1, 2, 3))
        outcomes = both(np.concatenate((rows, rows)), [replace(chain, parents=(-1, 0, 1, 2)), chain])
        assert str(outcomes[0]) == str(outcomes[1])


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_a_token_has_the_noise_of_its_position_in_each_branch(temperature: float) -> None:
    """Whatever branch the first tokens lie in, the draw is that of a session without a draft."""
    for seed in range(20):
        rows = np.random.default_rng(seed).normal(size=(4, 50)).astype(np.float32)
        draw = Draw(SamplingParams(temperature=temperature, seed=seed), (0, 1), 1, frozenset(), 0)
        own: tuple[int, ...] = ()
        for position in range(4):
            (outcome,) = both(rows[position : position + 1], [replace(draw, history=(0, 1, *own))])
            assert isinstance(outcome, Sampled)
            own += outcome.tokens
        first, second, third, last = own
        wrong = (first + 1) % 50
        tokens = (wrong, first, second, (second + 1) % 50, second, third, (third + 1) % 50)
        tree = replace(draw, draft_tokens=tokens, parents=(-1, -1, 0, 1, 1, 4, 4))
        depths = [0, 1, 1, 2, 2, 2, 3, 3]
        assert both(rows[depths], [tree]) == [Sampled((first, second, third, last))]


def test_a_bad_row_on_the_path_keeps_what_was_accepted_before_it() -> None:
    rows = np.zeros((4, 9), dtype=np.float32)
    rows[0, 5] = rows[2, 7] = 1.0
    rows[3] = math.nan
    draw = Draw(SamplingParams(temperature=0.0), (1,), 1, frozenset(), 0, (4, 5, 7), (-1, -1, 1))
    assert both(rows, [draw]) == [Sampled((5, 7))]
    rows[0] = math.nan
    assert isinstance(both(rows, [draw])[0], Broken)


def test_a_wrong_number_of_parents_is_refused() -> None:
    draw = Draw(SamplingParams(), (1,), 1, frozenset(), 0, (4, 5), (-1,))
    with pytest.raises(Broken, match="parents: must be 2, got 1"):
        draw_all(torch.zeros(3, 9), [draw])
