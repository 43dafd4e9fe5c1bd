"""Sample tokens where their logits are: on the CPU, or on the CUDA device that computed them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from galley.core.errors import GalleyError
from galley.core.step import Draw
from galley.engine.cuda import sampling as device_sampling
from galley.engine.load.draft_directory import ReducedHead
from galley.engine.masking import Mask, without_early_end
from galley.engine.sampling import draw as host_sampling
from galley.engine.sampling import guessing
from galley.engine.sampling.allowed import constrain
from galley.engine.sampling.draw import Outcome
from galley.engine.sampling.guessing import ListOutcome
from galley.engine.sampling.layout import is_plain, masked_positions


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

    `logits` and `draws` are those of `guess`. A row without a finite maximum gives Broken. Penalties and
    biases change the first candidate only: to draw the others with them would take a draw each.
    """
    columns = None if head is None else head.columns
    plain = [draw if is_plain(draw) else _plain(draw) for draw in draws]
    listed = guessing.list_rows(host_sampling.host_rows(logits.cpu()), plain, columns, count)
    others = [i for i, draw in enumerate(draws) if not is_plain(draw)]
    if others:
        outcomes, _ = guess(logits[others], [draws[i] for i in others], head)
        for i, outcome in zip(others, outcomes, strict=True):
            listed[i] = _after_first(outcome, listed[i], draws[i], count)
    return listed


def _plain(draw: Draw) -> Draw:
    """Return the draw without what makes its tokens depend on more than logits, filters and noise."""
    params = replace(
        draw.params, frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0, logit_bias={}
    )
    return replace(draw, params=params, min_tokens=0, logprobs=None)


def _after_first(first: Outcome, listed: ListOutcome, draw: Draw, count: int) -> ListOutcome:
    """Return the list with the token `first` before all others, without stop tokens that are masked."""
    if isinstance(first, GalleyError):
        return first
    if isinstance(listed, GalleyError):
        return listed
    (token,) = first.tokens
    masked = draw.stop_token_ids if masked_positions(draw) else frozenset()
    others = [one for one in listed if one[0] != token and one[0] not in masked]
    return [(token, dict(listed).get(token, listed[0][1])), *others][:count]
