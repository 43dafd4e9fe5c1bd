"""The CPU kernels of linear layers with int8 weights; arrays as in `attention`."""

# ruff: noqa: ARG001, PLR0913, PLR0917  # kernels take arrays and sizes, not objects; loops which thread they run on

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from galley.engine.cpu.kernels.attention import Floats, Stored
from galley.engine.cpu.kernels.int8_ops import GROUP, OUTPUTS, TILE_ROWS, dot_tile
from galley.engine.cpu.kernels.openmp import shared
from galley.engine.cpu.kernels.ops import helper, narrow, widen

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
