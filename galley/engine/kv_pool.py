"""The keys and values of all sequences of a model, in blocks of one allocation that never grows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from galley.core.kv.blocks import BLOCK_TOKENS
from galley.engine.errors import UnsupportedModel
from galley.engine.parallel.ranks import ALONE, Ranks

# The kernels take values 32 columns at a time.
_COLUMNS = 32


@dataclass(frozen=True, slots=True)
class KvShape:
    """The keys and values that one rank stores a position; `kv_heads` are its own."""

    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def value_width(self) -> int:
        return -(-self.value_dim // _COLUMNS) * _COLUMNS

    @property
    def block_bytes(self) -> int:
        numbers = self.layers * self.kv_heads * BLOCK_TOKENS * (self.key_dim + self.value_width)
        return numbers * self.dtype.itemsize


def kv_shape(config: Any, dtype: torch.dtype, ranks: Ranks = ALONE) -> KvShape:
    """Return the KV shape of a transformers configuration. Raises UnsupportedModel."""
    heads = config.num_attention_heads
    kv_heads = declared(config, "num_key_value_heads") or heads
    if kv_heads % ranks.size:
        raise UnsupportedModel(
            f"{config.model_type}: {ranks.size} ranks cannot share {kv_heads} KV heads evenly"
        )
    head_dim = declared(config, "head_dim") or config.hidden_size // heads
    key_dim = declared(config, "qk_head_dim") or head_dim
    value_dim = declared(config, "v_head_dim") or head_dim
    return KvShape(config.num_hidden_layers, kv_heads // ranks.size, key_dim, value_dim, dtype)


def declared(config: Any, name: str) -> Any:
    """Return the value of `name`, or None if the configuration's class does not declare it."""
    return getattr(config, name, None) if hasattr(type(config), name) else None


class KvPool:
    """`blocks` blocks of `block_tokens` positions; memory is committed as blocks are first written.

    keys: [layers, blocks, kv_heads, key_dim, block_tokens], so that a query reads a block's keys side by
    side; values: [layers, blocks, kv_heads, block_tokens, value_width]. Unwritten slots hold anything.
    """

    def __init__(self, shape: KvShape, blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.blocks = blocks
        self.block_tokens = BLOCK_TOKENS
        self.keys, self.values = self._allocate(device)

    def _allocate(self, device: torch.device) -> tuple[Tensor, Tensor]:
        shape, blocks = self.shape, self.blocks
        per_layer = shape.layers * blocks * shape.kv_heads * BLOCK_TOKENS
        numbers = torch.empty(
            per_layer * (shape.key_dim + shape.value_width), dtype=shape.dtype, device=device
        )
        keys, values = torch.split(numbers, [per_layer * shape.key_dim, per_layer * shape.value_width])
        head = (shape.layers, blocks, shape.kv_heads)
        return (
            keys.view(*head, shape.key_dim, BLOCK_TOKENS),
            values.view(*head, BLOCK_TOKENS, shape.value_width),
        )

    @property
    def block_bytes(self) -> int:
        return self.shape.block_bytes

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to), one after another."""
        for source, target in pairs:
            self.keys[:, target].copy_(self.keys[:, source])
            self.values[:, target].copy_(self.values[:, source])
