"""The CPU kernels of linear layers with int8 weights; arrays as in `attention`.

They use dot products of four bytes at a time (AVX-512 VNNI), or of two words (AVX2). Weights w are stored as
w + 128 in unsigned bytes, since VNNI multiplies unsigned by signed bytes. Each sum therefore starts at the
surplus, -128 times the sum of the row's integers. Integer sums are the same in any order, so a row's bits
depend neither on other rows nor on the instructions.
"""

# ruff: noqa: ARG001, PLR0913, PLR0917  # numba calls kernels and intrinsics with its own arguments

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numpy.typing import NDArray

from galley.engine.cpu.kernels.attention import Floats, Stored
from galley.engine.cpu.kernels.openmp import shared
from galley.engine.cpu.kernels.ops import (
    array_at,
    cgutils,
    fused,
    intrinsic,
    narrow,
    splat,
    switch_rows,
    vector_at,
    widen,
)

# Inputs that share a scale.
GROUP = 64

_I8, _I16, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


@dataclass(frozen=True, slots=True)
class Instructions:
    """A choice of instructions for `dot_tile`: one multiplies `depth` inputs of a row for `width` outputs.

    A tile has `outputs` outputs and at most `tile_rows` rows, so that the compiler keeps its sums in
    registers. `unrolled` of its GROUP / depth steps are emitted, in a loop.
    """

    depth: int
    width: int
    outputs: int
    tile_rows: int
    unrolled: int

    @property
    def parts(self) -> range:
        return range(self.outputs // self.width)

    @property
    def ints(self) -> Any:
        return ir.VectorType(_I32, self.width)

    @property
    def floats(self) -> Any:
        return ir.VectorType(_F32, self.width)


# Rows are int8 with VNNI and int16 with AVX2.
VNNI = Instructions(depth=4, width=16, outputs=32, tile_rows=8, unrolled=16)
# Few steps: of more, the compiler would widen all weights first, and keep them in memory.
AVX2 = Instructions(depth=2, width=8, outputs=16, tile_rows=4, unrolled=2)


@intrinsic
def dot_tile(
    typingctx: Any,
    rows: Any,
    numbers: Any,
    number_at: Any,
    stride: Any,
    factors: Any,
    surplus: Any,
    factor_at: Any,
    groups: Any,
    weights: Any,
    weight_at: Any,
    sums: Any,
) -> tuple[Any, Any]:
    """Sum factors[m, g] * (surplus[m, g] + numbers[m, g] . weights) over g < groups into sums[m, 0:outputs].

    For m < rows <= tile_rows of the instructions, which the type of `numbers` decides: int8 or int16. They
    lie `stride` apart from `number_at` on, float32 `factors` and int32 `surplus` `groups` apart from
    `factor_at` on; uint8 `weights` are [groups * GROUP / depth, outputs, depth] from `weight_at` on; `sums`
    is float32 [tile_rows * outputs].
    """
    by = VNNI if numbers.dtype == types.int8 else AVX2

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = partial(array_at, context, builder)
        count, b, b_at, stride_, f, s, f_at, groups_, w, w_at, out = args
        given = (
            at(numbers, b, b_at), stride_, at(factors, f, f_at), at(surplus, s, f_at), groups_,
            at(weights, w, w_at), at(sums, out, ir.Constant(_I64, 0)),
        )  # fmt: skip
        switch_rows(builder, count, by.tile_rows, lambda m: _emit_tile(builder, by, m, *given))
        return context.get_dummy_value()

    index = types.int64
    taken = (index, numbers, index, index, factors, surplus, index, index, weights, index, sums)
    return types.void(*taken), generate


def _emit_tile(
    builder: Any,
    by: Instructions,
    rows: int,
    numbers: Any,
    stride: Any,
    factors: Any,
    surplus: Any,
    groups: Any,
    weights: Any,
    sums: Any,
) -> None:
    totals = [[cgutils.alloca_once(builder, by.floats) for _ in by.parts] for _ in range(rows)]
    nothing = ir.Constant(by.floats, [0.0] * by.width)
    for row in totals:
        for total in row:
            builder.store(nothing, total)
    with cgutils.for_range(builder, groups) as loop:
        at = builder.mul(loop.index, ir.Constant(_I64, GROUP))
        starts = [_ahead(builder, numbers, at, stride, m) for m in range(rows)]
        own = [_ahead(builder, surplus, loop.index, groups, m) for m in range(rows)]
        scales = [_ahead(builder, factors, loop.index, groups, m) for m in range(rows)]
        ground = cgutils.gep_inbounds(builder, weights, builder.mul(at, ir.Constant(_I64, by.outputs)))
        for place, row, dots in zip(
            scales, totals, _emit_group(builder, by, starts, own, ground), strict=True
        ):
            scale = splat(builder, builder.load(place), by.floats)
            for total, dot in zip(row, dots, strict=True):
                wide = builder.sitofp(builder.load(dot), by.floats)
                builder.store(fused(builder, wide, scale, builder.load(total)), total)
    for m, row in enumerate(totals):
        for part, total in enumerate(row):
            to = cgutils.gep_inbounds(builder, sums, ir.Constant(_I64, m * by.outputs + part * by.width))
            builder.store(builder.load(total), builder.bitcast(to, by.floats.as_pointer()), align=4)


def _emit_group(
    builder: Any, by: Instructions, starts: Sequence[Any], surplus: Sequence[Any], weights: Any
) -> list[list[Any]]:
    """Emit the sums of one group; return where they are: for each row [parts] vectors of `width` int32."""
    load_lane, add_dot = (_load_bytes, _add_bytes) if by is VNNI else (_load_words, _add_words)
    dots = [[cgutils.alloca_once(builder, by.ints) for _ in by.parts] for _ in starts]
    for row, one in zip(dots, surplus, strict=True):
        for dot in row:
            builder.store(splat(builder, builder.load(one), by.ints), dot)
    with cgutils.for_range(builder, ir.Constant(_I64, GROUP // (by.depth * by.unrolled))) as loop:
        first = builder.mul(loop.index, ir.Constant(_I64, by.depth * by.unrolled))
        ground = cgutils.gep_inbounds(builder, weights, builder.mul(first, ir.Constant(_I64, by.outputs)))
        for step in range(by.unrolled):
            lanes = [
                load_lane(builder, ground, (step * by.outputs + part * by.width) * by.depth)
                for part in by.parts
            ]
            for row, start in zip(dots, starts, strict=True):
                few = vector_at(builder, cgutils.gep_inbounds(builder, start, first), step * by.depth, _I32)
                for dot, lane in zip(row, lanes, strict=True):
                    known = add_dot(builder, builder.load(dot), lane, splat(builder, few, by.ints))
                    builder.store(known, dot)
    return dots


def _load_bytes(builder: Any, weights: Any, at: int) -> Any:
    return vector_at(builder, weights, at, VNNI.ints)


def _add_bytes(builder: Any, known: Any, lane: Any, four: Any) -> Any:
    kind = ir.FunctionType(VNNI.ints, [VNNI.ints] * 3)
    dot = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpdpbusd.512")
    return builder.call(dot, [known, lane, four])


_WORDS = ir.VectorType(_I16, AVX2.width * AVX2.depth)


def _load_words(builder: Any, weights: Any, at: int) -> Any:
    """Load unsigned bytes and widen them to words."""
    return builder.zext(vector_at(builder, weights, at, ir.VectorType(_I8, _WORDS.count)), _WORDS)


def _add_words(builder: Any, known: Any, lane: Any, two: Any) -> Any:
    kind = ir.FunctionType(AVX2.ints, [_WORDS] * 2)
    dot = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.pmadd.wd")
    return builder.add(known, builder.call(dot, [lane, builder.bitcast(two, _WORDS)]))


def _ahead(builder: Any, pointer: Any, at: Any, stride: Any, row: int) -> Any:
    offset = builder.add(at, builder.mul(stride, ir.Constant(_I64, row)))
    return cgutils.gep_inbounds(builder, pointer, offset)


Numbers = NDArray[np.int8] | NDArray[np.int16]
Surplus = NDArray[np.int32]

_INT8_MAX = np.float32(127.0)
_ZERO = np.float32(0.0)
_MAGNITUDE = np.int32(0x7FFFFFFF)


@shared
def _quantize(
    thread: int, start: int, end: int, rows: Stored, numbers: Numbers, factors: Floats, surplus: Surplus
) -> None:
    """Round stored [rows, inputs] to [-127, 127] times a factor for each GROUP inputs, to nearest.

    surplus: int32 [rows, groups], -128 times the sum of the group's numbers.
    """
    for row in range(start, end):
        for group in range(factors.shape[1]):
            first = group * GROUP
            # As integers, magnitudes keep their order and a NaN is the largest: it becomes the factor.
            bits = np.int32(0)
            for i in range(first, first + GROUP):
                bits = max(bits, np.float32(widen(rows[row, i])).view(np.int32) & _MAGNITUDE)
            largest = np.int32(bits).view(np.float32)
            factors[row, group] = largest / _INT8_MAX
            inverse = _INT8_MAX / largest if largest > _ZERO else _ZERO
            total = np.int32(0)
            for i in range(first, first + GROUP):
                number = np.int32(np.rint(widen(rows[row, i]) * inverse))
                numbers[row, i] = number
                total += number
            surplus[row, group] = np.int32(-128) * total


@shared
def _multiply(
    thread: int,
    first: int,
    last: int,
    rows: int,
    tile_rows: int,
    tile_outputs: int,
    numbers: Numbers,
    factors: Floats,
    surplus: Surplus,
    weights: Any,
    scales: Floats,
    biases: Floats,
    out: Stored,
) -> None:
    inputs, groups = numbers.shape[1], factors.shape[1]
    sums = np.empty(tile_rows * tile_outputs, np.float32)
    for block in range(first, last):
        at = block * tile_outputs
        outputs = min(tile_outputs, out.shape[1] - at)
        for row in range(0, rows, tile_rows):
            count = min(tile_rows, rows - row)
            dot_tile(
                count, numbers, row * inputs, inputs, factors, surplus, row * groups, groups,
                weights, at * inputs, sums,
            )  # fmt: skip
            for m in range(count):
                for i in range(outputs):
                    scaled = sums[m * tile_outputs + i] * scales[at + i] + biases[at + i]
                    out[row + m, at + i] = narrow(scaled, out[0, 0])


def linear(
    threads: int,
    tile_rows: int,
    tile_outputs: int,
    rows: Stored,
    numbers: Numbers,
    weights: Any,
    scales: Floats,
    biases: Floats,
    out: Stored,
) -> None:
    """Multiply stored [rows, inputs] by int8 weights and add biases, into stored [rows, outputs].

    weights: uint8 [outputs / tile_outputs, inputs / depth, tile_outputs, depth], flat, offset by 128, the
    last tile padded; scales, biases: float32 [outputs]. The rows are rounded into `numbers` [rows, inputs],
    whose type chooses the instructions, each GROUP inputs with a scale of their own.
    """
    count, inputs = rows.shape
    factors = np.empty((count, inputs // GROUP), np.float32)
    surplus = np.empty((count, inputs // GROUP), np.int32)
    _quantize(threads if count > 1 else 1, count, rows, numbers, factors, surplus)
    tiles = (out.shape[1] + tile_outputs - 1) // tile_outputs
    _multiply(
        threads, tiles, count, tile_rows, tile_outputs, numbers, factors, surplus, weights, scales, biases,
        out,
    )  # fmt: skip
