"""The values that cross the engine's seam."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from galley.engine.cache import SessionCache


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts of a loaded model. `context_window` counts tokens; `dtype` and `device` are torch's names.

    `deterministic`: a position's logits have the same bits in any batch, chunk and prefill split. `ranks` is
    the number of ranks that share the weights.
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


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokens to feed after those in `cache`; the last `want_logits` rows get logits."""

    cache: SessionCache
    tokens: Sequence[int]
    want_logits: int
