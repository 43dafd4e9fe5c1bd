"""Sample tokens where their logits are: on the CPU, or on the CUDA device that computed them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from galley.core.errors import GalleyError
from galley.core.noise import gumbel, words
from galley.core.step import Draw, Sampled
from galley.engine.cuda import sampling as device_sampling
from galley.engine.load.draft_directory import ReducedHead
from galley.engine.masking import Mask, without_early_end
from galley.engine.sampling import draw as host_sampling
from galley.engine.sampling import guessing
from galley.engine.sampling.allowed import constrain
from galley.engine.sampling.draw import Outcome
from galley.engine.sampling.guessing import ListedToken, ListOutcome
from galley.engine.sampling.layout import is_plain, kernel_temperature


def draw_all(logits: Tensor, draws: Sequence[Draw]) -> list[Outcome]:
    """Sample every draw's rows of `logits`, float32 [rows, vocab]. Raises Broken for a wrong row count."""
    host_sampling.check_rows(logits.shape[0], draws)
    if logits.device.type == "cpu":
        return host_sampling.draw_rows(host_sampling.host_rows(logits), draws)
    return device_sampling.draw_all(logits, draws)


def draw_masked(logits: Tensor, draws: Sequence[Draw], masks: Sequence[Mask | None]) -> list[Outcome]:
    """Sample as `draw_all`, only tokens that the masks allow; `masks` is empty, or has one of each draw.

    A draw whose mask failed gives that error.
    """
    outcomes = draw_all(logits, with_masks(draws, masks))
    if not masks:
        return outcomes
    return [
        mask if isinstance(mask, GalleyError) else without_early_end(draw, outcome)
        for draw, mask, outcome in zip(draws, masks, outcomes, strict=True)
    ]


def with_masks(draws: Sequence[Draw], masks: Sequence[Mask | None]) -> Sequence[Draw]:
    """Return the draws with their masks, as far as they have one that did not fail."""
    if not masks:
        return draws
    return [
        draw if mask is None or isinstance(mask, GalleyError) else replace(draw, allowed=mask)
        for draw, mask in zip(draws, masks, strict=True)
    ]


def guess(
    logits: Tensor, draws: Sequence[Draw], head: ReducedHead | None
) -> tuple[list[Outcome], list[float]]:
    """Sample one draft token a draw; also return the probability of each row's likeliest allowed token.

    `logits` is float32 [draws, head_vocab], or [draws, vocab] without `head`. The draws have no draft tokens.
    A row without a finite maximum gives Broken.
    """
    if logits.device.type == "cpu" and all(map(is_plain, draws)):
        columns = None if head is None else head.columns
        return guessing.guess_rows(host_sampling.host_rows(logits), draws, columns)
    rows = constrain(logits if head is None else head.spread(logits), draws, range(len(draws)))
    confidences: list[float] = torch.softmax(rows, -1).amax(-1).tolist()
    return draw_all(rows, [replace(draw, allowed=None) for draw in draws]), confidences


def list_tokens(
    logits: Tensor, draws: Sequence[Draw], head: ReducedHead | None, count: int
) -> list[ListOutcome]:
    """Return the first `count` candidates of each draw, as far as there are any; `guess` draws the first one.

    `logits` and `draws` are those of `guess`. A row without a finite maximum gives Broken.
    """
    plain = [i for i, draw in enumerate(draws) if is_plain(draw)]
    others = [i for i, draw in enumerate(draws) if not is_plain(draw)]
    columns = None if head is None else head.columns
    rows = host_sampling.host_rows(logits.cpu())[plain]
    found = guessing.list_rows(rows, [draws[i] for i in plain], columns, count) if plain else []
    if others:
        whole = logits[others] if head is None else head.spread(logits[others])
        found += _list_in_turn(whole, [draws[i] for i in others], count)
    order = {row: at for at, row in enumerate((*plain, *others))}
    return [found[order[row]] for row in range(len(draws))]


def _list_in_turn(rows: Tensor, draws: Sequence[Draw], count: int) -> list[ListOutcome]:
    """Draw a token from each row, then another one without it, and so on."""
    left = constrain(rows, draws, range(len(draws))).clone()
    free = [replace(draw, allowed=None) for draw in draws]
    first = outcomes = draw_all(left, free)
    tokens: list[list[int]] = [[] for _ in draws]
    for _ in range(guessing.LISTED):
        for row, outcome in enumerate(outcomes):
            if isinstance(outcome, Sampled):
                tokens[row] += outcome.tokens
                left[row, outcome.tokens[0]] = -torch.inf
        outcomes = draw_all(left, free)
    return [
        of if isinstance(of, GalleyError) else _weighed(row, draw, drawn)[:count]
        for of, row, draw, drawn in zip(first, rows, draws, tokens, strict=True)
    ]


def _weighed(row: Tensor, draw: Draw, tokens: list[int]) -> list[ListedToken]:
    """Return the tokens with weights that leave penalties and biases out."""
    logits = row[tokens].double().cpu()
    if draw.params.is_greedy:
        weights = torch.exp(logits - torch.logsumexp(row.double(), 0).cpu())
    else:
        noise = torch.from_numpy(gumbel(words(draw.params.seed, len(draw.history), tokens)))
        scores = logits / kernel_temperature(draw.params) + noise
        weights = torch.softmax(scores / guessing.SOFTNESS, 0)
    return list(zip(tokens, weights.tolist(), strict=True))
