"""A causal language model that takes the new tokens of many sessions in one pass.

The seam between the engine and its users (docs/decisions/003-engine-seam.md): ModelInfo, SessionCache, Rows
and CausalModel. Not safe for two threads at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from services.common.tokenizer_hash import tokenizer_hash
from services.core.errors import Broken
from services.engine import loading, probe
from services.engine.attention import BatchPlan, Span
from services.engine.batch import ModelInfo, Rows
from services.engine.cache import SessionCache

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

__all__ = ["CausalModel", "ModelInfo", "Rows", "SessionCache"]

# Fewer rows take another kernel in float32, which rounds differently.
MIN_ROWS = 4
# Longer chunks are cut, so that memory is bounded.
MAX_ROWS = 512


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens [first, last) of the batch's item `item`."""

    item: int
    first: int
    last: int


class CausalModel:
    """Weights and the forward pass; the sessions' state lies in their caches."""

    def __init__(self, module: Any, info: ModelInfo) -> None:
        self.info = info
        self._module = module
        self._device = torch.device(info.device)

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        dtype: torch.dtype,
        device: str,
        threads: int | None = None,
        name: str | None = None,
    ) -> CausalModel:
        """The model in `directory`, checked against its own eager attention. Raises UnsupportedModel.

        `threads` sets torch's threads for the whole process; `name` is the directory's where not given.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        config = loading.load_config(directory)
        module = loading.load_module(directory, config, dtype=dtype, device=device)
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
        )
        model = cls(module, info)
        probe.refuse_other_attention(model, module)
        return cls(module, replace(info, deterministic=probe.keeps_bits(model)))

    def new_cache(self) -> SessionCache:
        """The empty cache of a new session."""
        return SessionCache()

    @torch.inference_mode()
    def forward(self, batch: Sequence[Rows]) -> list[Tensor]:
        """Feed each item's tokens at [len(cache.tokens), ...) and extend its cache.

        Returns, for each item, its wanted logits: float32 [want_logits, vocab_size], on the model's device.
        Raises Broken, before any work, if an item is out of bounds or a cache comes twice.
        """
        self._check(batch)
        logits: list[list[Tensor]] = [[] for _ in batch]
        for pieces in _passes(batch):
            for piece, rows in zip(pieces, self._pass(batch, pieces), strict=True):
                logits[piece.item].append(rows)
        return [self._join(parts) for parts in logits]

    def _check(self, batch: Sequence[Rows]) -> None:
        if len({id(item.cache) for item in batch}) < len(batch):
            raise Broken("a session's cache is twice in one batch")
        for item in batch:
            if not 0 <= item.want_logits <= len(item.tokens):
                raise Broken(f"cannot give logits of {item.want_logits} of {len(item.tokens)} rows")
            if len(item.cache.tokens) + len(item.tokens) > self.info.context_window:
                raise Broken(f"the context window of {self.info.context_window} tokens would overflow")
            if item.tokens and not 0 <= min(item.tokens) <= max(item.tokens) < self.info.vocab_size:
                raise Broken(f"a token id is not in [0, {self.info.vocab_size})")

    def _join(self, parts: list[Tensor]) -> Tensor:
        if not parts:
            return torch.empty(0, self.info.vocab_size, device=self._device)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _pass(self, batch: Sequence[Rows], pieces: Sequence[_Piece]) -> list[Tensor]:
        """One run through the layers; the wanted logits of each piece."""
        spans: list[Span] = []
        tokens: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        for piece in pieces:
            item = batch[piece.item]
            start = len(item.cache.tokens)
            rows = piece.last - piece.first
            skipped = min(rows, max(0, len(item.tokens) - item.want_logits - piece.first))
            wanted += range(len(tokens) + skipped, len(tokens) + rows)
            spans.append(Span(item.cache, start, rows))
            tokens += item.tokens[piece.first : piece.last]
            positions += range(start, start + rows)
        logits = self._run(spans, tokens, positions, wanted)
        return self._settle(batch, pieces, logits)

    def _run(
        self, spans: Sequence[Span], tokens: list[int], positions: list[int], wanted: list[int]
    ) -> Tensor:
        """Logits of the rows `wanted`: float32 [wanted, vocab_size]."""
        filler = [0] * (MIN_ROWS - len(tokens))
        plan = BatchPlan(spans, len(tokens) + len(filler), self._device)
        arguments = {
            "input_ids": self._tensor(tokens + filler)[None],
            "position_ids": self._tensor(positions + filler)[None],
            "use_cache": False,
            "galley_plan": plan,
        }
        if not wanted:
            self._module.base_model(**arguments)
            self._expect_layers(plan)
            return torch.empty(0, self.info.vocab_size, device=self._device)
        kept = self._tensor(wanted + [0] * (MIN_ROWS - len(wanted)))
        output = self._module(**arguments, logits_to_keep=kept).logits
        self._expect_layers(plan)
        logits: Tensor = output[0, : len(wanted)].float()
        return logits

    def _expect_layers(self, plan: BatchPlan) -> None:
        if len(plan.layers_seen) != self._module.config.num_hidden_layers:
            raise Broken(f"{len(plan.layers_seen)} layers came to our attention")

    def _settle(self, batch: Sequence[Rows], pieces: Sequence[_Piece], logits: Tensor) -> list[Tensor]:
        """Extend the caches by what was computed, and deal the logits out."""
        parts = []
        row = 0
        for piece in pieces:
            item = batch[piece.item]
            count = max(0, piece.last - max(piece.first, len(item.tokens) - item.want_logits))
            parts.append(logits[row : row + count])
            row += count
            item.cache.tokens.extend(item.tokens[piece.first : piece.last])
        return parts

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)


def _passes(batch: Sequence[Rows]) -> Iterator[list[_Piece]]:
    """The rows of a batch in order, cut into passes of at most MAX_ROWS rows."""
    pieces: list[_Piece] = []
    room = MAX_ROWS
    for index, item in enumerate(batch):
        first = 0
        while first < len(item.tokens):
            last = min(len(item.tokens), first + room)
            pieces.append(_Piece(index, first, last))
            room -= last - first
            first = last
            if room == 0:
                yield pieces
                pieces, room = [], MAX_ROWS
    if pieces:
        yield pieces
