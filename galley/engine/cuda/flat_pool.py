"""The pool as FlexAttention reads it in place: a head's positions, block after block, in one row."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from galley.core.kv.blocks import BLOCK_TOKENS
from galley.engine.kv_pool import KvPool


class FlatPool(KvPool):
    """keys: [layers, kv_heads, blocks + 1, block_tokens, key_dim]; values likewise, value_width wide.

    The last block is scratch: padding rows are written there. All slots start as zeros and values are kept
    finite (`galley.engine.cuda.flex`), since a masked key's value is multiplied by 0.
    """

    @property
    def scratch(self) -> int:
        return self.blocks

    @property
    def positions(self) -> int:
        return (self.blocks + 1) * BLOCK_TOKENS

    def _allocate(self, device: torch.device) -> tuple[Tensor, Tensor]:
        shape = self.shape
        head = (shape.layers, shape.kv_heads, self.blocks + 1, BLOCK_TOKENS)
        keys = torch.zeros(*head, shape.key_dim, dtype=shape.dtype, device=device)
        values = torch.zeros(*head, shape.value_width, dtype=shape.dtype, device=device)
        return keys, values

    def keys_of(self, layer: int) -> Tensor:
        """Return a view [kv_heads, positions, key_dim] of a layer's keys."""
        return self.keys[layer].flatten(1, 2)

    def values_of(self, layer: int) -> Tensor:
        """Return a view [kv_heads, positions, value_dim] of a layer's values."""
        return self.values[layer].flatten(1, 2)[..., : self.shape.value_dim]

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        for source, target in pairs:
            self.keys[:, :, target].copy_(self.keys[:, :, source])
            self.values[:, :, target].copy_(self.values[:, :, source])
