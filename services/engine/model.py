"""A causal language model that takes the new tokens of many sequences in one pass.

The seam between the engine and its users (docs/decisions/003-engine-seam.md). A model is used either through
`run`, by a scheduler that accounts for the blocks itself, or through caches and `forward`; never both. Not
safe for two threads at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from services.common.tokenizer_hash import tokenizer_hash
from services.core.errors import Broken
from services.core.step import Chunk
from services.engine import llama, loading, probe
from services.engine.batch import ModelInfo, Rows
from services.engine.cache import FreeBlocks, SessionCache
from services.engine.forwards import Forward, forward_of
from services.engine.kv_pool import KvPool, kv_shape
from services.engine.pages import Span
from services.engine.ranks import ALONE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from services.engine.ranks import Ranks

__all__ = ["CausalModel", "KvPool", "ModelInfo", "Rows", "SessionCache"]

# Longer chunks are cut, so that memory is bounded.
MAX_ROWS = 512
# Memory is committed as blocks are used.
DEFAULT_KV_BLOCKS = 2048


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens [first, last) of a chunk."""

    chunk: Chunk
    first: int
    last: int

    @property
    def wanted(self) -> int:
        """Of the last how many of its rows the logits are wanted."""
        return max(0, self.last - max(self.first, len(self.chunk.tokens) - self.chunk.want_logits))


class CausalModel:
    """Weights, the forward pass and the pool of keys and values."""

    def __init__(self, forward: Forward, info: ModelInfo) -> None:
        self.info = info
        self.kv = forward.attention.pool
        self._forward = forward
        self._free = FreeBlocks(self.kv.blocks)

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        dtype: torch.dtype,
        device: str,
        threads: int | None = None,
        name: str | None = None,
        kv_blocks: int = DEFAULT_KV_BLOCKS,
        ranks: Ranks = ALONE,
    ) -> CausalModel:
        """The model in `directory`, checked against its own eager attention. Raises UnsupportedModel.

        `threads` sets torch's threads for the whole process; `name` is the directory's where not given.
        `kv_blocks`: the pool's size. Each rank calls this with its own `ranks`.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        config = loading.load_config(directory)
        shape = kv_shape(config, dtype, ranks)
        module = loading.load_module(directory, config, dtype=dtype, device=device, ranks=ranks)
        info = ModelInfo(
            name=name or directory.name,
            directory=directory,
            context_window=config.max_position_embeddings,
            vocab_size=config.vocab_size,
            eos_token_ids=loading.eos_token_ids(directory, config),
            dtype=str(dtype).removeprefix("torch."),
            device=device,
            tokenizer_hash=tokenizer_hash(directory),
            deterministic=False,
            ranks=ranks.size,
        )
        pool = KvPool(shape, max(kv_blocks, probe.BLOCKS), torch.device(device))
        own = llama.serves(module, pool)
        # Our own forward takes the module apart; what is refused in attention is better said by our own pass.
        theirs = probe.eager_logits(module, probe.prompt_of(info)) if own else None
        model = cls(forward_of(module, pool, ranks, max_rows=MAX_ROWS, own=own), info)
        ours = probe.probe_logits(model)
        if theirs is None:
            theirs = probe.eager_logits(module, probe.prompt_of(info))
        probe.refuse_other_attention(config.model_type, ours, theirs, dtype)
        model.info = replace(info, deterministic=probe.keeps_bits(model))
        return model

    @property
    def forward_kind(self) -> str:
        """Whose code runs the layers: "own" or "transformers"."""
        return self._forward.kind

    @property
    def attention_kind(self) -> str:
        """Which attention is used."""
        return type(self._forward.attention).__name__

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk], copies: Sequence[tuple[int, int]] = ()) -> Tensor:
        """Copy blocks, feed the chunks, and put their keys and values into their blocks.

        Returns the wanted logits, float32 [sum of want_logits, vocab_size], in the order of the chunks, on
        the model's device. A row that is not finite is its own chunk's affair. Raises Broken, before any
        work, if a chunk is out of bounds.
        """
        self._check(chunks)
        self._check_blocks(chunks, copies)
        self.kv.copy(copies)
        logits = [rows for pieces in _passes(chunks) if len(rows := self._pass(pieces))]
        if not logits:
            return torch.empty(0, self.info.vocab_size, device=self.kv.keys.device)
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _pass(self, pieces: Sequence[_Piece]) -> Tensor:
        """One run through the layers; the wanted logits of the pieces."""
        tokens: list[int] = []
        wanted: list[int] = []
        spans = []
        for piece in pieces:
            tokens += piece.chunk.tokens[piece.first : piece.last]
            wanted += range(len(tokens) - piece.wanted, len(tokens))
            spans.append(Span(piece.chunk.start + piece.first, piece.last - piece.first, piece.chunk.blocks))
        return self._forward(self._forward.attention.lay_out(spans), tokens, wanted)

    def _check(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            rows = len(chunk.tokens)
            if not 0 <= chunk.want_logits <= rows:
                raise Broken(f"cannot give logits of {chunk.want_logits} of {rows} rows")
            if not 0 <= chunk.start <= self.info.context_window - rows:
                raise Broken(f"the context window of {self.info.context_window} tokens would overflow")
            if rows and not 0 <= min(chunk.tokens) <= max(chunk.tokens) < self.info.vocab_size:
                raise Broken(f"a token id is not in [0, {self.info.vocab_size})")

    def _check_blocks(self, chunks: Sequence[Chunk], copies: Sequence[tuple[int, int]]) -> None:
        """The kernels check no bounds: a wrong block would be another sequence's, or nobody's memory."""
        for chunk in chunks:
            if len(chunk.blocks) * self.kv.block_tokens < chunk.start + len(chunk.tokens):
                raise Broken(
                    f"{len(chunk.blocks)} blocks do not cover {chunk.start + len(chunk.tokens)} tokens"
                )
        used = [block for chunk in chunks for block in chunk.blocks]
        used += [block for pair in copies for block in pair]
        if used and not 0 <= min(used) <= max(used) < self.kv.blocks:
            raise Broken(f"a block is not in [0, {self.kv.blocks})")

    def new_cache(self) -> SessionCache:
        """The empty cache of a new sequence."""
        return SessionCache(self._free)

    def forward(self, batch: Sequence[Rows]) -> list[Tensor]:
        """Feed each item's tokens at [len(cache.tokens), ...) and extend its cache.

        Returns, for each item, its wanted logits: float32 [want_logits, vocab_size], on the model's device.
        Raises, before any work, Broken if an item is out of bounds or a cache comes twice, and Overloaded
        where there are too few blocks.
        """
        if len({id(item.cache) for item in batch}) < len(batch):
            raise Broken("a session's cache is twice in one batch")
        chunks = [
            Chunk(len(item.cache.tokens), item.tokens, item.cache.blocks, item.want_logits) for item in batch
        ]
        self._check(chunks)
        try:
            for item in batch:
                item.cache.reserve(len(item.cache.tokens) + len(item.tokens))
            logits = self.run(chunks)
        except BaseException:
            for item in batch:
                item.cache.trim()
            raise
        for item in batch:
            item.cache.tokens.extend(item.tokens)
        return list(torch.split(logits, [item.want_logits for item in batch]))


def _passes(chunks: Sequence[Chunk]) -> Iterator[list[_Piece]]:
    """The rows of the chunks in order, cut into passes of at most MAX_ROWS rows."""
    pieces: list[_Piece] = []
    room = MAX_ROWS
    for chunk in chunks:
        first = 0
        while first < len(chunk.tokens):
            last = min(len(chunk.tokens), first + room)
            pieces.append(_Piece(chunk, first, last))
            room -= last - first
            first = last
            if room == 0:
                yield pieces
                pieces, room = [], MAX_ROWS
    if pieces:
        yield pieces
