"""One training step of a feature draft: states dropped at random, then several tokens drafted at each place.

EAGLE-3 (arXiv 2503.01840) calls the latter training-time test: the draft reads its own states where the
target has none yet, at every place of the sequence at once. Only draft tokens after right ones count, so the
tokens that it reads are the target's own answers.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from galley.distill.data.corpus import Batch
from galley.distill.features.collection import Collected
from galley.distill.features.draft import FeatureDraft, TargetStates
from galley.distill.features.loss import feature_loss
from galley.distill.training.training import LossOf

DEPTHS = 3
"""Draft tokens in a row that training unrolls."""
# Weight of each further draft token: about the chance that it is reached.
_DECAY = 0.7
# Shares of the conversations with all states, with those after a random place, with none; others lose blocks.
_ALL, _LATER, _NONE = 0.6, 0.2, 0.1
_BLOCK, _LOST_BLOCKS = 8, 0.3


def unrolled_loss(draft: FeatureDraft, collected: Collected, seed: int, dtype: torch.dtype) -> LossOf:
    """Return the loss of a batch over all depths. What is dropped depends on `seed` and the step alone."""

    def loss_of(batch: Batch, step: int) -> Tensor:
        source = np.random.default_rng([seed, step])
        given = TargetStates(collected.states(batch), known_places(batch.tokens, source))
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            outputs = draft.unrolled(batch.tokens, batch.rows, given, DEPTHS)
        ranks, labels = torch.from_numpy(collected.corpus.ranks(batch.places)), collected.labels(batch.places)
        total = torch.zeros(())
        for depth, states in enumerate(outputs):
            losses = feature_loss(states.to(dtype), draft.lm_head.weight, labels)
            total = total + _DECAY**depth * (losses * (ranks >= depth)).sum()
        return total / (len(ranks) * sum(_DECAY**depth for depth in range(DEPTHS)))

    return loss_of


def known_places(tokens: Tensor, source: np.random.Generator) -> Tensor:
    """Return at which places of `tokens` [batch, length] the draft gets the target's states."""
    batch, length = tokens.shape
    known = np.ones((batch, length), np.bool_)
    for row, kind in zip(known, source.random(batch), strict=True):
        if kind < _ALL:
            continue
        if kind < _ALL + _LATER:
            row[: source.integers(length)] = False
        elif kind < _ALL + _LATER + _NONE:
            row[:] = False
        else:
            blocks = source.random(-(-length // _BLOCK)) >= _LOST_BLOCKS
            row[:] = np.repeat(blocks, _BLOCK)[:length]
    return torch.from_numpy(known)
