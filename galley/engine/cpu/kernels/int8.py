"""The CPU kernels of linear layers with int8 weights; arrays as in `attention`.

They use dot products of four bytes at a time (AVX-512 VNNI). Weights w are stored as w + 128 in unsigned
bytes, since the instruction multiplies unsigned by signed bytes. Each sum therefore starts at the surplus,
-128 times the sum of the signed bytes. Integer sums are the same in any order, so a row's bits do not depend
on other rows.
"""

# ruff: noqa: ARG001, PLR0913, PLR0917  # numba calls kernels and intrinsics with its own arguments

from __future__ import annotations

from collections.abc import Sequence
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
    helper,
    intrinsic,
    narrow,
    splat,
    switch_rows,
    widen,
)

# Inputs that share a scale; an instruction multiplies four of them for 16 outputs.
GROUP = 64
OUTPUTS = 32
DEPTH = 4
# 2 * 8 sums and as many totals: the compiler keeps the sums in registers.
TILE_ROWS = 8

_WIDTH = 16
_PARTS = OUTPUTS // _WIDTH
_I8, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_INTS, _FLOATS = ir.VectorType(_I32, _WIDTH), ir.VectorType(_F32, _WIDTH)
_DOT = "llvm.x86.avx512.vpdpbusd.512"


@intrinsic
def dot_tile(
    typingctx: Any,
    rows: Any,
    bytes_: Any,
    byte_at: Any,
    stride: Any,
    factors: Any,
    surplus: Any,
    factor_at: Any,
    groups: Any,
    weights: Any,
    weight_at: Any,
    sums: Any,
) -> tuple[Any, Any]:
    """Sum over g < groups of factors[m, g] * (surplus[m, g] + bytes_[m, g] . weights) into sums[m, 0:32].

    For m < rows <= TILE_ROWS. int8 `bytes_` lie `stride` apart from `byte_at` on, float32 `factors` and
    int32 `surplus` `groups` apart from `factor_at` on; uint8 `weights` are [groups * GROUP / 4, 32, 4] from
    `weight_at` on; `sums` is float32 [TILE_ROWS * 32].
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = partial(array_at, context, builder)
        count, b, b_at, stride_, f, s, f_at, groups_, w, w_at, out = args
        given = (
            at(bytes_, b, b_at), stride_, at(factors, f, f_at), at(surplus, s, f_at), groups_,
            at(weights, w, w_at), at(sums, out, ir.Constant(_I64, 0)),
        )  # fmt: skip
        switch_rows(builder, count, TILE_ROWS, lambda m: _emit_tile(builder, m, *given))
        return context.get_dummy_value()

    index = types.int64
    taken = (index, bytes_, index, index, factors, surplus, index, index, weights, index, sums)
    return types.void(*taken), generate


def _emit_tile(
    builder: Any,
    rows: int,
    bytes_: Any,
    stride: Any,
    factors: Any,
    surplus: Any,
    groups: Any,
    weights: Any,
    sums: Any,
) -> None:
    totals = [[cgutils.alloca_once(builder, _FLOATS) for _ in range(_PARTS)] for _ in range(rows)]
    nothing = ir.Constant(_FLOATS, [0.0] * _WIDTH)
    for row in totals:
        for total in row:
            builder.store(nothing, total)
    with cgutils.for_range(builder, groups) as loop:
        at = builder.mul(loop.index, ir.Constant(_I64, GROUP))
        starts = [_ahead(builder, bytes_, at, stride, m) for m in range(rows)]
        own = [_ahead(builder, surplus, loop.index, groups, m) for m in range(rows)]
        scales = [_ahead(builder, factors, loop.index, groups, m) for m in range(rows)]
        ground = cgutils.gep_inbounds(builder, weights, builder.mul(at, ir.Constant(_I64, OUTPUTS)))
        for place, row, dots in zip(scales, totals, _emit_group(builder, starts, own, ground), strict=True):
            scale = splat(builder, builder.load(place), _FLOATS)
            for total, dot in zip(row, dots, strict=True):
                wide = builder.sitofp(dot, _FLOATS)
                builder.store(fused(builder, wide, scale, builder.load(total)), total)
    for m, row in enumerate(totals):
        for part, total in enumerate(row):
            to = cgutils.gep_inbounds(builder, sums, ir.Constant(_I64, m * OUTPUTS + part * _WIDTH))
            builder.store(builder.load(total), builder.bitcast(to, _FLOATS.as_pointer()), align=4)


def _emit_group(builder: Any, starts: Sequence[Any], surplus: Sequence[Any], weights: Any) -> list[list[Any]]:
    """Return for each row the sums of one group, [parts] vectors of 16 int32."""
    dot = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_INTS, [_INTS] * 3), _DOT)
    dots = [[splat(builder, builder.load(one), _INTS)] * _PARTS for one in surplus]
    for step in range(GROUP // DEPTH):
        lanes = [
            _load(builder, weights, (step * _PARTS + part) * _WIDTH * DEPTH, _INTS) for part in range(_PARTS)
        ]
        for row, start in enumerate(starts):
            four = splat(builder, _load(builder, start, step * DEPTH, _I32), _INTS)
            dots[row] = [
                builder.call(dot, [known, lane, four]) for known, lane in zip(dots[row], lanes, strict=True)
            ]
    return dots


def _ahead(builder: Any, pointer: Any, at: Any, stride: Any, row: int) -> Any:
    offset = builder.add(at, builder.mul(stride, ir.Constant(_I64, row)))
    return cgutils.gep_inbounds(builder, pointer, offset)


def _load(builder: Any, pointer: Any, at: int, kind: Any) -> Any:
    place = cgutils.gep_inbounds(builder, pointer, ir.Constant(_I64, at))
    return builder.load(builder.bitcast(place, kind.as_pointer()), align=1)


Bytes = NDArray[np.int8]
Surplus = NDArray[np.int32]

_INT8_MAX = np.float32(127.0)
_ZERO = np.float32(0.0)
_MAGNITUDE = np.int32(0x7FFFFFFF)


@helper
def _quantize(rows: Stored, bytes_: Bytes, factors: Floats, surplus: Surplus) -> None:
    """Quantize stored [rows, inputs] to int8 times a factor for each GROUP inputs, rounded to nearest.

    surplus: int32 [rows, groups], -128 times the sum of the group's bytes.
    """
    for row in range(len(rows)):
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
                bytes_[row, i] = number
                total += number
            surplus[row, group] = np.int32(-128) * total


@shared
def _multiply(
    thread: int,
    first: int,
    last: int,
    rows: int,
    bytes_: Bytes,
    factors: Floats,
    surplus: Surplus,
    weights: Any,
    scales: Floats,
    out: Stored,
) -> None:
    inputs, groups = bytes_.shape[1], factors.shape[1]
    sums = np.empty(TILE_ROWS * OUTPUTS, np.float32)
    for block in range(first, last):
        for row in range(0, rows, TILE_ROWS):
            count = min(TILE_ROWS, rows - row)
            dot_tile(
                count, bytes_, row * inputs, inputs, factors, surplus, row * groups, groups,
                weights, block * OUTPUTS * inputs, sums,
            )  # fmt: skip
            for m in range(count):
                for i in range(OUTPUTS):
                    scaled = sums[m * OUTPUTS + i] * scales[block * OUTPUTS + i]
                    out[row + m, block * OUTPUTS + i] = narrow(scaled, out[0, 0])


def linear(threads: int, rows: Stored, weights: Any, scales: Floats, out: Stored) -> None:
    """Multiply stored [rows, inputs] by int8 weights into stored [rows, outputs].

    weights: uint8 [outputs / 32, inputs / 4, 32, 4], flat, offset by 128; scales: float32 [outputs]. The
    rows are rounded to int8 too, each GROUP inputs with a scale of their own.
    """
    count, inputs = rows.shape
    bytes_ = np.empty((count, inputs), np.int8)
    factors = np.empty((count, inputs // GROUP), np.float32)
    surplus = np.empty((count, inputs // GROUP), np.int32)
    _quantize(rows, bytes_, factors, surplus)
    _multiply(threads, out.shape[1] // OUTPUTS, count, bytes_, factors, surplus, weights, scales, out)
