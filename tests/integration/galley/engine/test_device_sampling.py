"""Sampling as a GPU is to do it, on the CPU: the same outcomes as the kernels of the host."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from galley.core import noise
from galley.core.errors import Broken, GalleyError
from galley.core.sampling_params import SamplingParams
from galley.core.step import Draw, Sampled
from galley.engine.cuda import sampling as device_sampling
from galley.engine.cuda.sampling import gumbel, is_drawn_here, row_words
from galley.engine.sampler import draw_all
from galley.engine.sampling.layout import Floats
from tests.integration.galley.engine.sampling_reference import allowing

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 1e-40},
    {"temperature": 0.0, "top_k": 3},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 0.8, "top_p": 0.7, "min_p": 0.01},
    {"temperature": 1.0, "frequency_penalty": 1.5},
    {"temperature": 1.0, "logit_bias": {1: 4.0}},
]


def _logits(rng: np.random.Generator, rows: int, vocab: int) -> torch.Tensor:
    logits = rng.normal(size=(rows, vocab)).astype(np.float32) * 3
    for row in logits:
        kind = rng.integers(8)
        if kind == 0:
            row[:] = np.round(row / 3)  # ties
        elif kind == 1:
            row[:] = 0.0
            row[rng.integers(vocab)] = -0.0
        elif kind == 2:
            row[rng.random(vocab) < 0.5] = -np.inf
        elif kind == 3:
            row[rng.integers(vocab)] = rng.choice([np.nan, np.inf])
        elif kind == 4:
            row[:] = -np.inf
    return torch.from_numpy(logits)


def _draw(rng: random.Random, vocab: int) -> Draw:
    chosen = rng.choice(PARAMS)
    params = replace(SamplingParams(), seed=rng.choice([0, 7, 2**64 - 1, rng.getrandbits(64)]), **chosen)
    history = tuple(rng.randrange(vocab) for _ in range(rng.randint(1, 6)))
    return Draw(
        params,
        history,
        1,
        frozenset({0}),
        rng.choice([0, 0, 9]),
        logprobs=rng.choice([None, None, 2]),
    )


def _masked(rng: random.Random, draw: Draw, rows: torch.Tensor) -> Draw:
    share, vocab = rng.choice([0.0, 0.1, 0.6, 1.0]), rows.shape[1]
    allowed = [[token for token in range(vocab) if rng.random() <= share] for _ in rows]
    return allowing(draw, allowed, vocab) if share else draw


def _guessed(rng: random.Random, draw: Draw, rows: torch.Tensor) -> Draw:
    guesses: list[int] = []
    while len(guesses) < len(rows) - 1:
        allowed = None if draw.allowed is None else draw.allowed[: len(guesses) + 1]
        before = replace(draw, draft_tokens=tuple(guesses), allowed=allowed)
        (outcome,) = draw_all(rows[: len(guesses) + 1], [before])
        good = isinstance(outcome, Sampled) and len(outcome.tokens) > len(guesses)
        guesses.append(outcome.tokens[-1] if good and isinstance(outcome, Sampled) else 0)
    if guesses and rng.random() < 0.4:
        guesses[rng.randrange(len(guesses))] += 1
    return replace(draw, draft_tokens=tuple(guesses))


def _same(ours: Sequence[Sampled | GalleyError], theirs: Sequence[Sampled | GalleyError]) -> None:
    assert [str(outcome) for outcome in ours] == [str(outcome) for outcome in theirs]


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), vocab=st.sampled_from([1, 3, 7, 64, 1003]))
def test_the_device_draws_what_the_host_draws(device: str, seed: int, vocab: int) -> None:
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    rows = [_logits(numbers, rng.choice([1, 1, 4]), vocab) for _ in range(6)]
    draws = [_guessed(rng, _masked(rng, _draw(rng, vocab), own), own) for own in rows]
    logits = torch.cat(rows)
    before = logits.clone()
    ours = device_sampling.draw_all(logits.to(device), draws)
    _same(ours, draw_all(logits, draws))
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32)), "the logits are left as they are"


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_plain_draws_copy_no_logits_to_the_host(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = [Draw(SamplingParams(temperature=temperature, seed=i), (1,), 1, frozenset(), 0) for i in range(3)]

    def refuse(rows: Floats, others: Sequence[Draw]) -> list[Sampled | GalleyError]:
        raise AssertionError(f"{len(rows)} rows for {len(others)} draws")

    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(1))
    expected = draw_all(logits, draws)
    monkeypatch.setattr(device_sampling, "draw_rows", refuse)
    _same(device_sampling.draw_all(logits, draws), expected)


def test_greedy_draws_compute_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kind: str) -> None:
        raise AssertionError(f"noise on {kind} for no rows")

    monkeypatch.setattr(device_sampling, "_words_on", refuse)
    draw = Draw(SamplingParams(temperature=0.0), (1,), 1, frozenset(), 0)
    assert device_sampling.draw_all(torch.eye(3, 9), [draw] * 3) == [Sampled((i,)) for i in range(3)]


def test_noise_that_cannot_be_compiled_is_the_same_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fail(*_: object) -> torch.Tensor:
        tried.append(1)
        raise RuntimeError("Failed to find C compiler")

    words = device_sampling.compiled_while_it_works(fail, row_words)
    monkeypatch.setattr(device_sampling, "_words_on", lambda _: words)
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(3))
    draws = [Draw(SamplingParams(seed=i), (1,), 1, frozenset(), 0) for i in range(3)]
    with capture_logs() as logs:
        for _ in range(2):
            _same(device_sampling.draw_all(logits, draws), draw_all(logits, draws))
    assert len(tried) == 1
    assert [line["error"] for line in logs] == ["Failed to find C compiler"]


def test_out_of_memory_is_raised_and_keeps_the_compiled_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [torch.OutOfMemoryError("CUDA out of memory")]

    def fail_once(*chosen: Any) -> torch.Tensor:
        if failures:
            raise failures.pop()
        return row_words(*chosen)

    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("it was given up")

    words = device_sampling.compiled_while_it_works(fail_once, refuse)
    monkeypatch.setattr(device_sampling, "_words_on", lambda _: words)
    draws = [Draw(SamplingParams(seed=1), (1,), 1, frozenset(), 0)]
    logits = torch.eye(1, 9)
    with pytest.raises(torch.OutOfMemoryError):
        device_sampling.draw_all(logits, draws)
    _same(device_sampling.draw_all(logits, draws), draw_all(logits, draws))


def test_a_bad_row_fails_its_own_draw_and_keeps_accepted_tokens() -> None:
    logits = torch.zeros(4, 9)
    logits[1], logits[3] = math.nan, -math.inf
    draw = Draw(SamplingParams(temperature=0.0), (5, 5), 1, frozenset(), 0)
    guessed = replace(draw, draft_tokens=(0,))
    first, second, last = device_sampling.draw_all(logits, [guessed, draw, draw])
    assert first == second == Sampled((0,)), "the accepted guess, without a token of its own"
    assert isinstance(last, Broken)
    assert "position 2:" in str(last)


def test_many_rows_are_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_sampling, "_CHUNK", 2 * 50)
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(2))
    draws = [Draw(SamplingParams(seed=i), (1,) * (i + 1), 1, frozenset(), 0) for i in range(7)]
    _same(device_sampling.draw_all(logits, draws), draw_all(logits, draws))


@pytest.mark.parametrize("device", DEVICES)
def test_words_of_rows_are_those_of_the_core(device: str) -> None:
    rows = [(0, 0), (2**64 - 1, 2**40 + 3), (0x9E3779B97F4A7C15, 4095)]
    seeds = torch.tensor([noise.halves(seed) for seed, _ in rows], device=device)
    positions = torch.tensor([noise.halves(position) for _, position in rows], device=device)
    words = row_words(seeds, positions, 1001).cpu().numpy()
    for own, (seed, position) in zip(words, rows, strict=True):
        assert (own == noise.words(seed, position, range(1001))).all()


@pytest.mark.parametrize("device", DEVICES)
def test_noise_agrees_with_the_host_to_a_millionth(device: str) -> None:
    words = np.concatenate(([0, 2**32 - 1], noise.words(1, 2, range(5000)))).astype(np.uint32)
    got = gumbel(torch.from_numpy(words.astype(np.int64)).to(device)).cpu().numpy()
    np.testing.assert_allclose(got, noise.gumbel(words), rtol=0, atol=1e-6)


def test_draws_with_history_or_filters_are_not_drawn_here() -> None:
    draw = Draw(SamplingParams(), (1,), 1, frozenset({3}), 0)
    assert is_drawn_here(draw)
    assert is_drawn_here(replace(draw, params=SamplingParams(temperature=0.0, top_k=2, top_p=0.5)))
    for other in (
        replace(draw, logprobs=0),
        replace(draw, min_tokens=1),
        replace(draw, params=SamplingParams(top_k=2)),
        replace(draw, params=SamplingParams(top_p=0.5)),
        replace(draw, params=SamplingParams(min_p=0.1)),
        replace(draw, params=SamplingParams(presence_penalty=0.1)),
        replace(draw, params=SamplingParams(temperature=0.0, logit_bias={1: 1.0})),
    ):
        assert not is_drawn_here(other)
