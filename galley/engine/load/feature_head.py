"""Project states onto embeddings of a draft: its target's of confirmed tokens, its own of draft tokens.

Training writes the projections (galley/distill/features/draft.py). Both results are added to the embedding of
the token after the one that the state is of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

from galley.engine.cpu.int8 import int8_product
from galley.engine.cpu.packing import Linears, Product

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

    def __init__(
        self,
        layers: tuple[int, ...],
        projections: Mapping[str, nn.Linear],
        scales: Mapping[str, Tensor],
        config: Any,
        dtype: torch.dtype,
    ) -> None:
        self.layers = layers
        self.size: int = config.hidden_size
        self._eps: float = config.rms_norm_eps
        self._features = _Projection(projections[FEATURES], scales[FEATURES_SCALE], dtype)
        self._own = _Projection(projections[OWN], scales[OWN_SCALE], dtype)

    def from_target(self, states: Tensor) -> Tensor:
        """Return what is added for the target's states [rows, layers, size], float32 [rows, size]."""
        return self._features(self._normalized(states).flatten(1))

    def from_own(self, states: Tensor) -> Tensor:
        """Return what is added for the draft's own states [rows, size], float32 [rows, size]."""
        return self._own(self._normalized(states))

    def _normalized(self, states: Tensor) -> Tensor:
        return rms_norm(states.float(), (self.size,), eps=self._eps)


class _Projection:
    """Multiply scaled rows by a weight; int8 weights as the layers of the draft, if its CPU can."""

    def __init__(self, layer: nn.Linear, scale: Tensor, dtype: torch.dtype) -> None:
        self._scale, self._rows_dtype = scale.float(), torch.float32
        weight = layer.weight.detach().float()
        self._run: Product = lambda rows: linear(rows, weight)
        product = int8_product([layer], torch.float32) if scale.device.type == "cpu" else None
        if product is not None:
            self._run, self._rows_dtype = product, Linears(dtype, "cpu").rows_dtype

    def __call__(self, rows: Tensor) -> Tensor:
        return self._run((rows * self._scale).to(self._rows_dtype))
