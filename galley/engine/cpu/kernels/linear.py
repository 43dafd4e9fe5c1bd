"""The CPU kernel of linear layers with float weights; arrays as in `attention`.

An output is one chain of operations over the inputs in order, for any number of rows, so a row's bits do not
depend on the others. An operation is one fused multiply-add of a weight, widened if it is bfloat16.
"""

# ruff: noqa: ARG001, PLR0913, PLR0917  # numba calls kernels and intrinsics with its own arguments

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from galley.engine.cpu.kernels.attention import Floats, Stored
from galley.engine.cpu.kernels.openmp import shared
from galley.engine.cpu.kernels.ops import (
    array_at,
    cgutils,
    fused,
    has_wide_registers,
    helper,
    intrinsic,
    narrow,
    prefetch,
    row_at,
    splat,
    switch_rows,
    vector_at,
)

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()


_FLOAT_BYTES, _LINE_BYTES = 4, 64
# The CPU itself does not fetch far enough ahead while several rows are multiplied.
_AHEAD_BYTES = 2048


@dataclass(frozen=True, slots=True)
class Tile:
    """At most `rows` rows by `parts` vectors of `width` outputs: as many sums as the registers hold."""

    rows: int
    parts: int
    width: int

    @property
    def outputs(self) -> int:
        return self.parts * self.width

    @property
    def floats(self) -> Any:
        return ir.VectorType(_F32, self.width)

    @property
    def ints(self) -> Any:
        return ir.VectorType(_I32, self.width)


AVX512, AVX2 = Tile(rows=8, parts=2, width=16), Tile(rows=4, parts=3, width=8)


# The tile of this CPU.
TILE = AVX512 if has_wide_registers() else AVX2


def tile_sum(by: Tile) -> Any:
    """Return an intrinsic that sums numbers[m] . weights over the inputs into sums[m, 0:outputs].

    Rows, at most the tile's, lie `stride` apart. float32 weights are [steps, outputs], bfloat16 ones [steps,
    outputs, 2]: two inputs a step. sums: float32 [rows, outputs].
    """

    @intrinsic
    def summed(
        typingctx: Any,
        rows: Any,
        numbers: Any,
        number_at: Any,
        stride: Any,
        weights: Any,
        weight_at: Any,
        steps: Any,
        sums: Any,
    ) -> tuple[Any, Any]:
        emit_step = _emit_widened if weights.dtype == types.uint16 else _emit_fused

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            at = partial(array_at, context, builder)
            count, a, a_at, stride_, w, w_at, steps_, out = args
            starts, ground = at(numbers, a, a_at), at(weights, w, w_at)
            end = at(sums, out, ir.Constant(_I64, 0))
            given = (starts, stride_, ground, steps_, end)
            switch_rows(builder, count, by.rows, lambda m: _emit_tile(builder, by, emit_step, m, *given))
            return context.get_dummy_value()

        index = types.int64
        return types.void(index, numbers, index, index, weights, index, index, sums), generate

    return summed


_sum_tile = tile_sum(TILE)


def _emit_tile(
    builder: Any,
    by: Tile,
    emit_step: Any,
    rows: int,
    numbers: Any,
    stride: Any,
    weights: Any,
    steps: Any,
    sums: Any,
) -> None:
    totals = [[cgutils.alloca_once(builder, by.floats) for _ in range(by.parts)] for _ in range(rows)]
    for row in totals:
        for total in row:
            builder.store(ir.Constant(by.floats, [0.0] * by.width), total)
    starts = [row_at(builder, numbers, stride, m) for m in range(rows)]
    with cgutils.for_range(builder, steps) as loop:
        emit_step(builder, by, starts, weights, loop.index, totals)
    for m, row in enumerate(totals):
        for part, total in enumerate(row):
            to = cgutils.gep_inbounds(builder, sums, ir.Constant(_I64, m * by.outputs + part * by.width))
            builder.store(builder.load(total), builder.bitcast(to, by.floats.as_pointer()), align=4)


def _step_at(builder: Any, by: Tile, weights: Any, step: Any, depth: int) -> Any:
    """Return the address of a step's weights; prefetch those that are read _AHEAD_BYTES later."""
    ground = row_at(builder, weights, step, depth * by.outputs)
    number_bytes = _FLOAT_BYTES // depth
    for at in range(0, _FLOAT_BYTES * by.outputs, _LINE_BYTES):
        ahead = ir.Constant(_I64, (_AHEAD_BYTES + at) // number_bytes)
        prefetch(builder, cgutils.gep_inbounds(builder, ground, ahead))
    return ground


def _emit_fused(builder: Any, by: Tile, starts: Any, weights: Any, step: Any, totals: Any) -> None:
    ground = _step_at(builder, by, weights, step, 1)
    lanes = [vector_at(builder, ground, part * by.width, by.floats) for part in range(by.parts)]
    for start, row in zip(starts, totals, strict=True):
        _add(builder, by, cgutils.gep_inbounds(builder, start, step), lanes, row)


def _emit_widened(builder: Any, by: Tile, starts: Any, weights: Any, step: Any, totals: Any) -> None:
    for i, lanes in enumerate(_widened(builder, by, _pairs(builder, by, weights, step))):
        at = builder.add(builder.shl(step, ir.Constant(_I64, 1)), ir.Constant(_I64, i))
        for start, row in zip(starts, totals, strict=True):
            _add(builder, by, cgutils.gep_inbounds(builder, start, at), lanes, row)


def _widened(builder: Any, by: Tile, pairs: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the lower and the upper bfloat16 of each pair as float32."""
    half, upper = (ir.Constant(by.ints, [bits] * by.width) for bits in (16, -65536))
    return (
        [builder.bitcast(builder.shl(pair, half), by.floats) for pair in pairs],
        [builder.bitcast(builder.and_(pair, upper), by.floats) for pair in pairs],
    )


def _add(builder: Any, by: Tile, number: Any, lanes: Any, row: Any) -> None:
    factor = splat(builder, builder.load(number), by.floats)
    for total, lane in zip(row, lanes, strict=True):
        builder.store(fused(builder, factor, lane, builder.load(total)), total)


def _pairs(builder: Any, by: Tile, weights: Any, step: Any) -> list[Any]:
    ground = _step_at(builder, by, weights, step, 2)
    return [vector_at(builder, ground, 2 * part * by.width, by.ints) for part in range(by.parts)]


@intrinsic
def _widen_tile(typingctx: Any, weights: Any, weight_at: Any, steps: Any, wide: Any) -> tuple[Any, Any]:
    """Write uint16 [steps, outputs, 2] from `weight_at` on as float32 [steps, 2, outputs] to `wide`."""
    by = TILE

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        w, w_at, steps_, out = args
        ground = array_at(context, builder, weights, w, w_at)
        end = array_at(context, builder, wide, out, ir.Constant(_I64, 0))
        with cgutils.for_range(builder, steps_) as loop:
            to = row_at(builder, end, loop.index, 2 * by.outputs)
            lower, upper = _widened(builder, by, _pairs(builder, by, ground, loop.index))
            for i, vector in enumerate((*lower, *upper)):
                place = cgutils.gep_inbounds(builder, to, ir.Constant(_I64, i * by.width))
                builder.store(vector, builder.bitcast(place, by.floats.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(weights, types.int64, types.int64, wide), generate


@helper
def _sum_block(
    block: int,
    tile_rows: int,
    tile_outputs: int,
    depth: int,
    rows: Stored,
    weights: Stored,
    weight_at: int,
    biases: Floats,
    out: Stored,
    sums: Floats,
) -> None:
    """Multiply all rows by the weights of one tile of outputs, from `weight_at` on."""
    count, inputs = rows.shape
    flat = rows.reshape(-1)
    at = block * tile_outputs
    outputs = min(tile_outputs, out.shape[1] - at)
    tiles = (count + tile_rows - 1) // tile_rows
    for i in range(tiles):
        row, end = count * i // tiles, count * (i + 1) // tiles
        _sum_tile(end - row, flat, row * inputs, inputs, weights, weight_at, inputs // depth, sums)
        for m in range(end - row):
            for j in range(outputs):
                out[row + m, at + j] = narrow(sums[m * tile_outputs + j] + biases[at + j], out[0, 0])


@shared
def _multiply(
    thread: int,
    first: int,
    last: int,
    tile_rows: int,
    tile_outputs: int,
    depth: int,
    rows: Stored,
    weights: Stored,
    biases: Floats,
    out: Stored,
) -> None:
    sums = np.empty(tile_rows * tile_outputs, np.float32)
    for block in range(first, last):
        at = block * tile_outputs * rows.shape[1]
        _sum_block(block, tile_rows, tile_outputs, depth, rows, weights, at, biases, out, sums)


@shared
def _multiply_many(
    thread: int,
    first: int,
    last: int,
    tile_rows: int,
    tile_outputs: int,
    rows: Floats,
    weights: Stored,
    biases: Floats,
    out: Stored,
) -> None:
    inputs = rows.shape[1]
    sums = np.empty(tile_rows * tile_outputs, np.float32)
    wide = np.empty(tile_outputs * inputs, np.float32)
    for block in range(first, last):
        _widen_tile(weights, block * tile_outputs * inputs, inputs // 2, wide)
        _sum_block(block, tile_rows, tile_outputs, 1, rows, wide, 0, biases, out, sums)


def linear(
    threads: int,
    tile_rows: int,
    tile_outputs: int,
    depth: int,
    rows: Stored,
    weights: Stored,
    biases: Floats,
    out: Stored,
) -> None:
    """Multiply stored [rows, inputs] by weights and add biases, into stored [rows, outputs].

    weights: [outputs / tile_outputs, inputs / depth, tile_outputs, depth], flat, the last tile padded;
    float32 with depth 1, bfloat16 with depth 2. biases: float32 [outputs].
    """
    blocks = (out.shape[1] + tile_outputs - 1) // tile_outputs
    _multiply(threads, blocks, tile_rows, tile_outputs, depth, rows, weights, biases, out)


def linear_many(
    threads: int,
    tile_rows: int,
    tile_outputs: int,
    depth: int,
    rows: Floats,
    weights: Stored,
    biases: Floats,
    out: Stored,
) -> None:
    """Compute the same bits as `linear` from float32 rows and bfloat16 weights; faster for many rows.

    A tile of weights is widened once, not again for each tile of rows.
    """
    blocks = (out.shape[1] + tile_outputs - 1) // tile_outputs
    _multiply_many(threads, blocks, tile_rows, tile_outputs, rows, weights, biases, out)
