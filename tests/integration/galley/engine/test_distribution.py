"""The verify rule end to end, on models small enough that the truth is known.

Three checks, each run on the real rule and on mutants of it, which must fail the very same check: confirmed
tokens follow p (chi-square), guesses match as often as the closed form says (binomial), and the tokens are
those of plain decoding whatever the draft.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import binomtest, chi2, chisquare

from bench.acceptance.closed_form import match_chance, optimal_chance
from galley.core import noise
from galley.core.acceptance import Verdict, confirm
from galley.core.content import common_prefix_len
from galley.core.sampling_params import SamplingParams
from galley.core.step import Draw
from tests.integration.galley.engine.sampling_reference import sample

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

Verify = Callable[[torch.Tensor, Draw, Sequence[int]], Verdict]

P_BOUND = 1e-4
TARGET = np.array([0.32, 0.22, 0.16, 0.12, 0.08, 0.06, 0.03, 0.01])
DRAFT = np.array([0.02, 0.14, 0.16, 0.04, 0.30, 0.20, 0.10, 0.04])
FAR = 10**9


def verify(logits: torch.Tensor, context: Draw, guesses: Sequence[int]) -> Verdict:
    return _confirm(context, guesses, sample(logits, context, guesses))


def _confirm(context: Draw, guesses: Sequence[int], sampled: Sequence[int]) -> Verdict:
    position = len(context.history)
    return confirm(guesses, sampled, position=position, max_position=FAR, stop_token_ids=frozenset())


def ratio_test(context: Draw, guesses: Sequence[int], *, residual_domain: int) -> Verdict:
    """Leviathan et al. (arXiv 2211.17192, algorithm 1): accept with chance p / q, else draw max(p - q, 0)."""
    seed, n = context.params.seed, len(context.history)
    for i, guess in enumerate(guesses):
        coin = float(noise.words(seed, n + i, [0], domain=7)[0]) * 2.0**-32
        if coin >= TARGET[guess] / DRAFT[guess]:
            residual = np.maximum(TARGET - DRAFT, 0.0)
            token = gumbel_argmax(residual, seed, np.array([n + i]), residual_domain)
            return Verdict((*guesses[:i], int(token[0])), i)
    bonus = gumbel_argmax(TARGET, seed, np.array([n + len(guesses)]))
    return Verdict((*guesses, int(bonus[0])), len(guesses))


def ratio_test_with_shared_noise(logits: torch.Tensor, context: Draw, guesses: Sequence[int]) -> Verdict:
    """The residual token is sampled with the noise that the draft's guess has already won with: biased."""
    return ratio_test(context, guesses, residual_domain=noise.GUMBEL)


def ratio_test_with_its_own_noise(logits: torch.Tensor, context: Draw, guesses: Sequence[int]) -> Verdict:
    return ratio_test(context, guesses, residual_domain=8)


def penalties_that_forget_accepted_drafts(
    logits: torch.Tensor, context: Draw, guesses: Sequence[int]
) -> Verdict:
    return _row_by_row(logits, guesses, lambda i: replace(context, history=[*context.history, *[-1] * i]))


def position_one_ahead(logits: torch.Tensor, context: Draw, guesses: Sequence[int]) -> Verdict:
    return _row_by_row(
        logits, guesses, lambda i: replace(context, history=[*context.history, *guesses[:i], -1])
    )


def position_one_behind_after_the_first(
    logits: torch.Tensor, context: Draw, guesses: Sequence[int]
) -> Verdict:
    def of_row(i: int) -> Draw:
        tokens = [*context.history, *guesses[:i]]
        return replace(context, history=tokens[min(i, 1) :], prompt_len=context.prompt_len - min(i, 1))

    return _row_by_row(logits, guesses, of_row)


def _row_by_row(
    logits: torch.Tensor, guesses: Sequence[int], context_of_row: Callable[[int], Draw]
) -> Verdict:
    sampled = [sample(logits[i : i + 1], context_of_row(i), ())[0] for i in range(len(logits))]
    accepted = common_prefix_len(guesses, sampled)
    return Verdict(tuple(sampled[: accepted + 1]), accepted)


def gumbel_argmax(weights: Floats, seed: int, positions: Ints, domain: int = noise.GUMBEL) -> Ints:
    counter = np.zeros((len(positions), len(weights) // 4, 4), dtype=np.uint32)  # [positions, blocks, 4]
    counter[..., 0] = np.arange(len(weights) // 4)
    counter[..., 1] = positions[:, None]
    counter[..., 3] = domain
    words = noise.philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32)).reshape(len(positions), -1)
    with np.errstate(divide="ignore"):
        scores = np.log(weights) + noise.gumbel(words)
    winners: Ints = scores.argmax(axis=1)
    return winners


@dataclass(frozen=True)
class Draws:
    tokens: Ints  # [seeds, positions]
    verified: int
    accepted: int


def draw(rule: Verify, seeds: int, length: int) -> Draws:
    logits = torch.tensor(np.log(TARGET), dtype=torch.float32).expand(5, -1)
    rows, verified, accepted = [], 0, 0
    for index in range(seeds):
        seed, k = index * 0x9E3779B97F4A7C15 % 2**64, index % 5
        guesses = gumbel_argmax(DRAFT, seed, np.arange(1 + length + k)).tolist()
        tokens = [0]
        while len(tokens) <= length:
            context = Draw(SamplingParams(seed=seed), tokens, 1, frozenset(), 0)
            verdict = rule(logits[: k + 1], context, guesses[len(tokens) : len(tokens) + k])
            tokens = [*tokens, *verdict.tokens]
            verified += min(k, verdict.accepted + 1)
            accepted += verdict.accepted
        rows.append(tokens[1 : length + 1])
    return Draws(np.array(rows), verified, accepted)


@cache
def real_draws() -> Draws:
    return draw(verify, seeds=1000, length=100)


def check_distribution(tokens: Ints) -> None:
    """Chi-square of the frequencies in all, by position, and of neighbouring pairs; each p > P_BOUND."""
    in_all = chisquare(np.bincount(tokens.ravel(), minlength=8), TARGET * tokens.size).pvalue
    by_position = np.array([np.bincount(column, minlength=8) for column in tokens.T])
    expected = TARGET * len(tokens)
    statistic = ((by_position - expected) ** 2 / expected).sum()
    per_position = chi2.sf(statistic, 7 * tokens.shape[1])
    pairs = (tokens[:, 0::2] * 8 + tokens[:, 1::2]).ravel()
    independent = np.outer(TARGET, TARGET).ravel() * pairs.size
    of_pairs = chisquare(np.bincount(pairs, minlength=64), independent).pvalue
    assert min(in_all, per_position, of_pairs) > P_BOUND, (in_all, per_position, of_pairs)


def check_match_rate(draws: Draws) -> None:
    closed_form = match_chance(TARGET, DRAFT)
    assert binomtest(draws.accepted, draws.verified, closed_form).pvalue > P_BOUND


def test_confirmed_tokens_follow_the_targets_distribution() -> None:
    draws = real_draws()
    assert draws.tokens.size >= 100_000
    check_distribution(draws.tokens)


def test_confirmed_tokens_are_the_unpruned_formula_of_seed_and_position() -> None:
    for index, tokens in enumerate(real_draws().tokens[:200]):
        seed = index * 0x9E3779B97F4A7C15 % 2**64
        assert tokens.tolist() == gumbel_argmax(TARGET, seed, np.arange(1, 101)).tolist()


def test_guesses_match_as_often_as_the_closed_form_says() -> None:
    """Daliri, Musco, Suresh (arXiv 2408.07978)."""
    draws = real_draws()
    assert draws.verified > 60_000
    check_match_rate(draws)
    measured = binomtest(draws.accepted, draws.verified).proportion_ci(1 - P_BOUND)
    optimal = optimal_chance(TARGET, DRAFT)
    assert optimal / (2 - optimal) < measured.low, "the bound (1 - TV) / (1 + TV)"


def test_mutant_ratio_test_with_shared_noise_is_caught() -> None:
    draws = draw(ratio_test_with_shared_noise, seeds=100, length=100)
    with pytest.raises(AssertionError):
        check_distribution(draws.tokens)


def test_the_ratio_test_with_its_own_noise_is_not_biased() -> None:
    check_distribution(draw(ratio_test_with_its_own_noise, seeds=100, length=100).tokens)


def test_mutant_position_off_by_one_misses_the_match_rate() -> None:
    with pytest.raises(AssertionError):
        check_match_rate(draw(position_one_ahead, seeds=50, length=40))


VOCAB = 10
PROMPT = [3, 1, 4, 1, 5]
LENGTH = 60
PENALIZED = SamplingParams(
    temperature=0.9,
    top_k=8,
    top_p=0.97,
    min_p=0.01,
    frequency_penalty=0.6,
    presence_penalty=0.4,
    repetition_penalty=1.2,
)
SETTINGS = {
    "greedy": SamplingParams(temperature=0.0, frequency_penalty=0.3),
    "cool": replace(PENALIZED, temperature=0.8, seed=2**63 + 1),
    "hot": replace(PENALIZED, temperature=1.2, seed=12345),
}

Draft = Callable[[list[int], int], list[int]]


@cache
def table(seed: int) -> torch.Tensor:
    rows = np.random.default_rng(seed).normal(size=(VOCAB, VOCAB)) * 1.5
    return torch.tensor(rows, dtype=torch.float32)


def decode(rule: Verify, params: SamplingParams, draft: Draft, k: int) -> tuple[list[int], Counter[int]]:
    tokens, accepted = list(PROMPT), Counter[int]()
    while len(tokens) < len(PROMPT) + LENGTH:
        guesses = draft(tokens, k)
        inputs = [tokens[-1], *(guess % VOCAB for guess in guesses)]
        context = Draw(params, tokens, len(PROMPT), frozenset(), 0)
        verdict = rule(table(0)[inputs], context, guesses)
        tokens = [*tokens, *verdict.tokens]
        accepted[verdict.accepted] += 1
    return tokens[: len(PROMPT) + LENGTH], accepted


def nothing(tokens: list[int], k: int) -> list[int]:
    return []


def liar(tokens: list[int], k: int) -> list[int]:
    """Tokens beyond the vocabulary among them."""
    return [(7 * len(tokens) + 3 * i) % (2 * VOCAB) for i in range(k)]


def coupled(params: SamplingParams) -> Draft:
    logits = table(0) + 0.3 * table(1)

    def propose(tokens: list[int], k: int) -> list[int]:
        ahead = list(tokens)
        for _ in range(k):
            context = Draw(params, ahead, len(PROMPT), frozenset(), 0)
            ahead += sample(logits[ahead[-1]][None], context, ())
        return ahead[len(tokens) :]

    return propose


def oracle(plain: list[int], spoil_rate: float) -> Draft:
    def propose(tokens: list[int], k: int) -> list[int]:
        truth = [*plain, *[0] * k][len(tokens) : len(tokens) + k]
        coins = [float(noise.words(1, len(tokens) + i, [0], noise.SPOIL)[0]) * 2.0**-32 for i in range(k)]
        return [
            (token + 1) % VOCAB if coin < spoil_rate else token
            for token, coin in zip(truth, coins, strict=True)
        ]

    return propose


def check_tokens_are_plain(rule: Verify, params: SamplingParams) -> Counter[tuple[int, int]]:
    plain, _ = decode(verify, params, nothing, 0)
    drafts = [nothing, liar, coupled(params), *(oracle(plain, rate) for rate in (0.0, 0.2, 0.6))]
    seen = Counter[tuple[int, int]]()
    for draft in drafts:
        for k in (1, 4, 8):
            tokens, accepted = decode(rule, params, draft, k)
            assert tokens == plain
            seen.update({(k, count): times for count, times in accepted.items()})
    return seen


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_equal_plain_decoding_with_any_draft(name: str) -> None:
    seen = check_tokens_are_plain(verify, SETTINGS[name])
    assert {(k, count) for k in (1, 4, 8) for count in range(k + 1)} <= seen.keys()


@pytest.mark.parametrize("name", SETTINGS)
def test_mutant_penalties_that_forget_accepted_drafts_is_caught(name: str) -> None:
    with pytest.raises(AssertionError):
        check_tokens_are_plain(penalties_that_forget_accepted_drafts, SETTINGS[name])


@pytest.mark.parametrize("mutant", [position_one_ahead, position_one_behind_after_the_first])
@pytest.mark.parametrize("name", ["cool", "hot"])  # greedy has no noise, so no position to mistake
def test_mutant_position_off_by_one_is_caught(mutant: Verify, name: str) -> None:
    with pytest.raises(AssertionError):
        check_tokens_are_plain(mutant, SETTINGS[name])


def test_row_by_row_mutants_differ_only_by_their_mutation() -> None:
    def unmutated(logits: torch.Tensor, context: Draw, guesses: Sequence[int]) -> Verdict:
        return _row_by_row(
            logits, guesses, lambda i: replace(context, history=[*context.history, *guesses[:i]])
        )

    check_tokens_are_plain(unmutated, SETTINGS["hot"])
