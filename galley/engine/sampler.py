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
from galley.engine.sampling.layout import is_plain


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
