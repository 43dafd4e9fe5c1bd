"""Project states onto embeddings of a draft: its target's of confirmed tokens, its own of draft tokens.

Training writes the projections (galley/distill/features/draft.py). Both results are added to the embedding of
the token after the one that the state is of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

FEATURES, FEATURES_SCALE = "features.weight", "features_scale"
OWN, OWN_SCALE = "own.weight", "own_scale"


def head_shapes(hidden: int, layers: int) -> dict[str, list[int]]:
    """Return the shapes of the weights of a draft that reads states after `layers` layers."""
    width = layers * hidden
    return {
        FEATURES: [hidden, width],
        FEATURES_SCALE: [width],
        OWN: [hidden, hidden],
        OWN_SCALE: [hidden],
    }


class FeatureHead:
    """The projections of states of `size` numbers: the target's after `layers`, and the draft's own."""

    def __init__(self, layers: tuple[int, ...], weights: Mapping[str, Tensor], config: Any) -> None:
        self.layers = layers
        self.size: int = config.hidden_size
        self._eps: float = config.rms_norm_eps
        self._features = weights[FEATURES].float(), weights[FEATURES_SCALE].float()
        self._own = weights[OWN].float(), weights[OWN_SCALE].float()

    @torch.inference_mode()
    def from_target(self, states: Tensor) -> Tensor:
        """Return what is added for the target's states [rows, layers, size], float32 [rows, size]."""
        weight, scale = self._features
        return linear(self._normalized(states).flatten(1) * scale, weight)

    @torch.inference_mode()
    def from_own(self, states: Tensor) -> Tensor:
        """Return what is added for the draft's own states [rows, size], float32 [rows, size]."""
        weight, scale = self._own
        return linear(self._normalized(states) * scale, weight)

    def _normalized(self, states: Tensor) -> Tensor:
        return rms_norm(states.float(), (self.size,), eps=self._eps)
