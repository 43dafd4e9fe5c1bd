"""Facts and inputs of a model, and KV caches of sequences for callers that do not account for blocks."""

from __future__ import annotations

import heapq
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from galley.core.errors import Overloaded
from galley.core.kv.blocks import BLOCK_TOKENS

NONE, INT8 = "none", "int8"

_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts of a loaded model; `dtype` and `device` are torch's names.

    `quantization` is that of the weights: NONE or INT8.
    `deterministic`: the logits of a probe prompt kept their bits in other batches and prefill splits.
    `ranks` is the number of ranks that share the weights.
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
    ranks: int = 1
    quantization: str = NONE

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
    """The KV of `tokens`; `CausalModel.forward` extends it. Its blocks become free when it is deleted."""

    __slots__ = ("__weakref__", "_free", "blocks", "tokens")

    def __init__(self, free: FreeBlocks) -> None:
        self.tokens: list[int] = []
        self.blocks: list[int] = []
        self._free = free
        weakref.finalize(self, free.give_back, self.blocks).atexit = False

    def reserve(self, length: int) -> None:
        """Hold blocks for [0, length). Raises Overloaded, holding no more than before."""
        missing = _blocks_of(length) - len(self.blocks)
        if missing > 0:
            self.blocks += self._free.take(missing)

    def truncate(self, length: int) -> None:
        if not 0 <= length <= len(self.tokens):
            raise ValueError(f"length: must be in [0, {len(self.tokens)}], got {length}")
        del self.tokens[length:]
        self.trim()

    def trim(self) -> None:
        kept = _blocks_of(len(self.tokens))
        self._free.give_back(self.blocks[kept:])
        del self.blocks[kept:]


def _blocks_of(length: int) -> int:
    return -(-length // BLOCK_TOKENS)


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokens to feed after those in `cache`; the last `want_logits` rows get logits."""

    cache: SessionCache
    tokens: Sequence[int]
    want_logits: int
