"""transformers' modelling code on a device where every launch costs: few shapes, one copy up a step.

A step is padded to a shape of a short list, so that the same kernels recur and can be recorded
(galley/engine/cuda/graphs.py). Padding rows write to the pool's scratch block and attend to nothing. Steps
larger than the list run unpadded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from galley.engine.attention import run_module
from galley.engine.cuda import flex_layout
from galley.engine.cuda.flex import FlexAttention
from galley.engine.cuda.flex_layout import StepShape
from galley.engine.cuda.graphs import Graphs
from galley.engine.pages import Pages

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384)


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes that steps are padded to: `rows` of the list, or always `fixed` rows."""

    rows: tuple[int, ...] = ROWS
    fixed: int | None = None

    def of(self, pages: Pages, logit_rows: int, slots: int) -> StepShape | None:
        """Return the smallest shape that holds the step, or None. Raises ValueError if it exceeds `fixed`."""
        own = flex_layout.exact(pages, logit_rows, slots)
        if self.fixed is not None:
            return self._fixed(own, self.fixed)
        rows = _padded(own.rows, self.rows)
        if rows is None:
            return None
        filled = _padded(logit_rows, (0, *self.rows))
        return flex_layout.StepShape(rows, filled or 0, _power(own.tiles), slots, own.width)

    def _fixed(self, own: StepShape, rows: int) -> StepShape:
        if own.rows > rows:
            raise ValueError(f"rows: must be at most {rows} in a step of fixed shape, got {own.rows}")
        tiles = rows + flex_layout.TILES  # a tile has at least a row; one without rows follows
        return flex_layout.StepShape(rows, rows if own.logit_rows else 0, tiles, own.slots, own.width)


def _padded(count: int, steps: tuple[int, ...]) -> int | None:
    return next((step for step in steps if step >= count), None)


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()


class DeviceForward:
    """A `Forward` on a CUDA device; with `graphs`, steps of the list's shapes are recorded."""

    kind = "transformers"

    def __init__(self, module: Any, attention: FlexAttention, shapes: Shapes, graphs: Graphs | None) -> None:
        self.attention = attention
        self._module = module
        self._shapes = shapes
        self._graphs = graphs
        self._device = attention.pool.keys.device

    def __call__(self, pages: Pages, tokens: Sequence[int], logit_rows: Sequence[int]) -> Tensor:
        slots = self.attention.slots(pages.spans)
        listed = self._shapes.of(pages, len(logit_rows), slots)
        shape = listed or flex_layout.exact(pages, len(logit_rows), slots)
        packed = self.attention.pack(shape, pages, tokens, logit_rows)

        def body(buffer: Tensor) -> Tensor:
            placed = self.attention.place(shape, buffer)
            inputs = placed.inputs
            rows = inputs.tokens.long()[None], inputs.positions.long()[None]
            return run_module(self._module, self.attention, placed, *rows, inputs.logit_rows.long())

        if listed is None or self._graphs is None:
            logits = body(packed.to(self._device, non_blocking=True))
        else:
            logits = self._graphs.run(shape, packed, body)
        return logits[: len(logit_rows)]
