"""Facts and inputs of a model, and KV caches of sequences for callers that do not account for blocks."""

from __future__ import annotations

import heapq
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from galley.core.errors import Overloaded
from galley.core.kv.blocks import BLOCK_TOKENS
from galley.core.trees import CHAIN, Parents

if TYPE_CHECKING:
    from torch import Tensor

NONE, INT8 = "none", "int8"

_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts of a loaded model; `dtype` and `device` are torch's names.

    `quantization` is that of the weights: NONE or INT8.
    `deterministic`: the logits of a probe prompt kept their bits in other batches and prefill splits.
    `trees`: they kept them as nodes of a tree too, or nothing keeps them.
    `ranks` is the number of ranks that share the weights.
    `layers` and `hidden_size` are those of its states; 0 if it offers none.
    """

    name: str
    directory: Path
    context_window: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    tokenizer_hash: str
    deterministic: bool
    trees: bool = False
    ranks: int = 1
    quantization: str = NONE
    layers: int = 0
    hidden_size: int = 0

    @property
    def number_types(self) -> str:
        """Return what people read: the dtype, and the type of quantized weights."""
        return self.dtype if self.quantization == NONE else f"{self.dtype}+{self.quantization}"


class FreeBlocks:
    """The free blocks of a pool; the lowest are taken first, so that little memory is touched."""

    __slots__ = ("__weakref__", "_free")

    def __init__(self, blocks: int) -> None:
        self._free = list(range(blocks))

    def __len__(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Return `count` blocks. Raises Overloaded, taking none, if fewer are free."""
        if count > len(self._free):
            raise Overloaded(f"KV blocks: {count} needed, {len(self._free)} free", _RETRY_AFTER_S)
        return [heapq.heappop(self._free) for _ in range(count)]

    def give_back(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            heapq.heappush(self._free, block)


class SessionCache:
    """The KV of `tokens`, and after them of a tree; `CausalModel.forward` extends it.

    `tree` is the tokens of the nodes, `parents` theirs. The blocks become free when the cache is deleted.
    """

    __slots__ = ("__weakref__", "_free", "blocks", "parents", "tokens", "tree")

    def __init__(self, free: FreeBlocks) -> None:
        self.tokens: list[int] = []
        self.tree: list[int] = []
        self.parents: Parents = CHAIN
        self.blocks: list[int] = []
        self._free = free
        weakref.finalize(self, free.give_back, self.blocks).atexit = False

    @property
    def slots(self) -> int:
        return len(self.tokens) + len(self.tree)

    def reserve(self, slots: int) -> None:
        """Hold blocks for [0, slots). Raises Overloaded, holding no more than before."""
        missing = _blocks_of(slots) - len(self.blocks)
        if missing > 0:
            self.blocks += self._free.take(missing)

    def extend(self, tokens: Sequence[int], parents: Parents) -> None:
        """Add tokens whose KV was written; the last slots, as many as there are parents, are a tree."""
        confirmed = self.slots + len(tokens) - len(parents) - len(self.tokens)
        self.tokens += tokens[:confirmed]
        self.tree += tokens[confirmed:]
        self.parents = parents

    def truncate(self, length: int) -> None:
        """Keep the first `length` of the tokens, and no tree."""
        if not 0 <= length <= len(self.tokens):
            raise ValueError(f"length: must be in [0, {len(self.tokens)}], got {length}")
        del self.tokens[length:]
        self.tree, self.parents = [], CHAIN
        self.trim()

    def trim(self) -> None:
        kept = _blocks_of(self.slots)
        self._free.give_back(self.blocks[kept:])
        del self.blocks[kept:]


def _blocks_of(length: int) -> int:
    return -(-length // BLOCK_TOKENS)


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokens to feed after those in `cache`; the last `want_logits` rows get logits.

    The last tokens, as many as there are `parents`, are a tree (`galley/core/trees.py`). To extend it, feed
    the new nodes alone, with the parents of all nodes.

    `added`, float32 [len(tokens), hidden] on the model's device, is added to their embeddings.
    """

    cache: SessionCache
    tokens: Sequence[int]
    want_logits: int
    parents: Parents = CHAIN
    added: Tensor | None = None
