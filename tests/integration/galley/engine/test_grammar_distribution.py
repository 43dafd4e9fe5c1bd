"""Tokens drawn under a grammar follow the model's distribution, masked and normalized anew, at each position.

The tiny model's logits are known for every text of a small grammar. Sessions are decoded with drafts that are
right, wrong or not allowed; the frequencies of the confirmed tokens after each text are compared with it by a
chi-square test. Mutants that take a mask from the wrong position, or forget it in drafted rows, must fail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import chi2

from galley.core.acceptance import confirm
from galley.core.grammar.compiled import CompiledGrammar, compile_grammar
from galley.core.grammar.spec import GrammarSpec
from galley.core.sampling_params import SamplingParams
from galley.core.step import Draw, Sampled
from galley.engine.masking import confirmed_mask
from galley.engine.sampler import draw_masked
from tests.fakes.tiny_model import STOP, VOCAB, random_llama
from tests.fakes.vocabularies import of_bytes

Mask = NDArray[np.uint32]
Mutant = Callable[[Mask], Mask]

PROMPT = [5, 9, 60]
GRAMMAR = "(a|bc?|dd?d?)(e|f[gh])?"
LONGEST = 6
DRAWS, SEEDS_AT_ONCE = 50_000, 500
P_BOUND = 1e-4


@cache
def grammar() -> CompiledGrammar:
    """Return the grammar over the tiny model's vocabulary: bytes, one end token, and two longer tokens."""
    tokens = [bytes([token]) for token in range(VOCAB)]
    tokens[2], tokens[3] = b"bc", b"dd"
    return compile_grammar(of_bytes(tokens, [STOP]), GrammarSpec("regex", GRAMMAR))


@cache
def allowed_after(output: tuple[int, ...]) -> list[int]:
    state = grammar().start()
    state.confirm(output)
    bits = np.unpackbits(state.masks(()).view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


@cache
def all_outputs() -> list[tuple[int, ...]]:
    """Return the outputs of the grammar that do not end yet."""
    found: list[tuple[int, ...]] = [()]
    for output in found:
        found += [(*output, token) for token in allowed_after(output) if token != STOP]
    return found


@cache
def logits() -> dict[tuple[int, ...], torch.Tensor]:
    """Return the tiny model's logits after each output."""
    model: Any = random_llama(hidden_size=32, spread=0.4, seed=0)
    model.eval()
    rows = {}
    with torch.inference_mode():
        for output in all_outputs():
            rows[output] = model(torch.tensor([[*PROMPT, *output]])).logits[0, -1].float()
    return rows


def logits_after(output: Sequence[int]) -> torch.Tensor:
    """Return the logits after an output; those of its allowed beginning where a draft leads out."""
    known = tuple(output)
    while known not in logits():
        known = known[:-1]
    return logits()[known]


def draft_of(output: tuple[int, ...], random: Random) -> tuple[int, ...]:
    """Return up to three draft tokens: mostly allowed ones."""
    draft: tuple[int, ...] = ()
    for _ in range(random.randrange(4)):
        after = (*output, *draft)
        is_allowed = after in logits() and random.random() < 0.9
        draft = (*draft, random.choice(allowed_after(after)) if is_allowed else random.randrange(VOCAB))
    return draft


def frequencies(draws: int, mutate: Mutant = lambda mask: mask) -> dict[tuple[int, ...], Counter[int]]:
    """Decode sessions until `draws` tokens are drawn; count them by the output before."""
    masks: dict[tuple[tuple[int, ...], tuple[int, ...]], Mask] = {}
    counts: dict[tuple[int, ...], Counter[int]] = {output: Counter() for output in all_outputs()}
    random, drawn, seed = Random(0), 0, 0
    while drawn < draws:
        seeds = range(seed, seed + SEEDS_AT_ONCE)
        seed += SEEDS_AT_ONCE
        running: dict[int, tuple[int, ...]] = dict.fromkeys(seeds, ())
        while running:
            asked = [(number, output, draft_of(output, random)) for number, output in running.items()]
            batch = [_draw(number, output, draft) for number, output, draft in asked]
            for (_, output, draft), draw in zip(asked, batch, strict=True):
                if (output, draft) not in masks:
                    masks[output, draft] = mutate(confirmed_mask(grammar().start(), draw))
            rows = torch.stack(
                [logits_after((*out, *draft[:i])) for _, out, draft in asked for i in range(len(draft) + 1)]
            )
            outcomes = draw_masked(rows, batch, [masks[output, draft] for _, output, draft in asked])
            for (number, output, draft), outcome in zip(asked, outcomes, strict=True):
                assert isinstance(outcome, Sampled)
                verdict = confirm(
                    draft,
                    outcome.tokens,
                    position=len(PROMPT) + len(output),
                    max_position=len(PROMPT) + LONGEST,
                    stop_token_ids=frozenset({STOP}),
                )
                for token in verdict.tokens:
                    counts.setdefault(output, Counter())[token] += 1
                    drawn += 1
                    output = (*output, token)  # noqa: PLW2901
                running[number] = output
                if output[-1] == STOP or output not in logits():
                    del running[number]
    return counts


def _draw(seed: int, output: Sequence[int], draft: tuple[int, ...]) -> Draw:
    params = SamplingParams(temperature=0.9, seed=seed * 0x9E3779B97F4A7C15 % 2**64)
    return Draw(params, [*PROMPT, *output], len(PROMPT), frozenset({STOP}), 0, draft)


def p_value(counts: dict[tuple[int, ...], Counter[int]]) -> float:
    """Return the chance of these or less likely frequencies; 0 if a token was drawn that is not allowed."""
    statistic, freedom = 0.0, 0
    for output, found in counts.items():
        if output not in logits():
            return 0.0
        allowed = allowed_after(output)
        weights = torch.softmax(logits()[output][allowed].double() / 0.9, -1).numpy()
        if not found.keys() <= set(allowed):
            return 0.0
        expected = weights * found.total()
        seen = np.array([found[token] for token in allowed])
        common = expected >= 5
        if common.sum() < 2:
            continue
        groups = [*zip(seen[common], expected[common], strict=True)]
        if not common.all():
            groups.append((seen[~common].sum(), expected[~common].sum()))
        statistic += sum((count - mean) ** 2 / mean for count, mean in groups if mean > 0)
        freedom += len(groups) - 1
    return float(chi2.sf(statistic, freedom))


def test_tokens_follow_the_masked_distribution_at_each_position() -> None:
    counts = frequencies(DRAWS)
    assert sum(found.total() for found in counts.values()) >= DRAWS
    assert sum(found.total() > 0 for found in counts.values()) > 15
    assert p_value(counts) > P_BOUND


def _forgotten_in_drafted_rows(mask: Mask) -> Mask:
    return np.concatenate((mask[:1], np.full_like(mask[1:], 0xFFFFFFFF)))


def _of_the_position_before(mask: Mask) -> Mask:
    return mask[[0, *range(len(mask) - 1)]]


def _one_token_less(mask: Mask) -> Mask:
    """Forbid "d" everywhere: all tokens are still allowed ones."""
    less = mask.copy()
    less[:, ord("d") >> 5] &= ~np.uint32(1 << (ord("d") & 31))
    return less


@pytest.mark.parametrize("mutant", [_forgotten_in_drafted_rows, _of_the_position_before, _one_token_less])
def test_mutants_are_caught(mutant: Mutant) -> None:
    assert p_value(frequencies(2_000, mutant)) < P_BOUND
