"""transformers' own modelling code on a device that pays for every launch: few shapes, one copy up a pass.

A pass is filled up to a shape of a short list, so that the same kernels come again and can be recorded
(galley/engine/cuda/graphs.py). Padding rows write to the pool's scratch block and see nothing. Passes
larger than the list run as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from galley.engine.attention import Pass
from galley.engine.cuda import flex_layout
from galley.engine.cuda.flex import FlexAttention, Placed, PlacedPages
from galley.engine.cuda.flex_layout import PassShape
from galley.engine.cuda.graphs import Graphs
from galley.engine.pages import Pages

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384)


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes that passes are filled up to: `rows` of the list, or `fixed` rows whatever there is."""

    rows: tuple[int, ...] = ROWS
    fixed: int | None = None

    def of(self, pages: Pages, wanted: int, slots: int) -> PassShape | None:
        """The smallest that holds the pass; None: none does. Raises ValueError if `fixed` are too few."""
        own = flex_layout.exact(pages, wanted, slots)
        if self.fixed is not None:
            return self._fixed(own, self.fixed)
        rows = _padded(own.rows, self.rows)
        if rows is None:
            return None
        filled = _padded(wanted, (0, *self.rows))
        return flex_layout.PassShape(rows, filled or 0, _power(own.tiles), slots, own.width)

    def _fixed(self, own: PassShape, rows: int) -> PassShape:
        if own.rows > rows:
            raise ValueError(f"a pass of {own.rows} rows where all are of {rows}")
        tiles = rows + flex_layout.TILES  # a tile has a row at least; after the last comes one without
        return flex_layout.PassShape(rows, rows if own.wanted else 0, tiles, own.slots, own.width)


def _padded(count: int, steps: tuple[int, ...]) -> int | None:
    return next((step for step in steps if step >= count), None)


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()


class DeviceForward:
    """See `Forward`; with `graphs`, passes of the list's shapes are recorded."""

    kind = "transformers"

    def __init__(self, module: Any, attention: FlexAttention, shapes: Shapes, graphs: Graphs | None) -> None:
        self.attention = attention
        self._module = module
        self._shapes = shapes
        self._graphs = graphs
        self._device = attention.pool.keys.device

    def __call__(self, pages: Pages, tokens: Sequence[int], wanted: Sequence[int]) -> Tensor:
        """See `Forward`."""
        slots = self.attention.slots(pages.spans)
        listed = self._shapes.of(pages, len(wanted), slots)
        shape = listed or flex_layout.exact(pages, len(wanted), slots)
        packed = self.attention.pack(shape, pages, tokens, wanted)

        def body(buffer: Tensor) -> Tensor:
            return self._run(pages, self.attention.place(shape, buffer))

        if listed is None or self._graphs is None:
            logits = body(packed.to(self._device, non_blocking=True))
        else:
            logits = self._graphs.run(shape, packed, body)
        return logits[: len(wanted)]

    def _run(self, pages: Pages, placed: Placed) -> Tensor:
        """All of a pass that is the device's: float32 [placed.shape.wanted, vocab_size]."""
        current = Pass(self.attention, _placed_pages(pages, placed))
        inputs = placed.inputs
        arguments = {
            "input_ids": inputs.tokens.long()[None],
            "position_ids": inputs.positions.long()[None],
            "use_cache": False,
            "galley_pass": current,
        }
        if placed.shape.wanted == 0:
            self._module.base_model(**arguments)
            logits = torch.empty(0, self._module.config.vocab_size, device=self._device)
        else:
            logits = self._module(**arguments, logits_to_keep=inputs.wanted.long()).logits[0].float()
        current.expect_layers(self._module.config.num_hidden_layers)
        return logits


def _placed_pages(pages: Pages, placed: Placed) -> PlacedPages:
    return PlacedPages(
        pages.spans,
        pages.positions,
        pages.places,
        pages.tables,
        pages.tiles,
        pages.longest,
        pages.work,
        placed,
    )
