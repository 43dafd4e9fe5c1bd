"""Operations that numba lacks: fused multiply-add, bit casts, and products of small register tiles.

Every operation here is one IEEE operation per lane, in the order written. The compiler may not reorder them,
so a result's bits depend on its operands alone, however many results are computed side by side. bfloat16 is
stored as uint16.
"""

# ruff: noqa: ARG001, PLR0913, PLR0917  # numba calls these with its own contexts and types

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import binding, ir
from numba.core import cgutils as _cgutils
from numba.core import types
from numba.extending import intrinsic as _intrinsic

cgutils: Any = _cgutils

F = TypeVar("F", bound="Callable[..., Any]")

# Keys of a block, columns of a tile of values.
LANES = 32
# Rows of one tile: 12 * 32 floats fill 24 of the 32 AVX-512 registers.
TILE_ROWS = 12
# Rows whose 32 or 16 floats fill 12 of the 16 AVX2 registers.
_ROWS_OF_32, _ROWS_OF_16 = 3, 6

_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_F32 = ir.FloatType()
_VECTOR = ir.VectorType(_F32, LANES)


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return numba's `intrinsic`; compiled code calls it without the first argument."""
    made: Callable[..., Any] = _intrinsic(function)
    return made


def helper(function: F) -> F:
    return cast("F", numba.njit(nogil=True, boundscheck=False, error_model="numpy")(function))


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> tuple[Any, Any]:
    """Return a * b + c, rounded once, in float32."""

    float32 = types.float32
    return float32(float32, float32, float32), lambda _c, builder, _s, args: fused(builder, *args)


@intrinsic
def widen(typingctx: Any, stored: Any) -> tuple[Any, Any]:
    """Return a stored number (float32, or bfloat16 as uint16) as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if stored == types.float32:
            return args[0]
        return builder.bitcast(builder.shl(builder.zext(args[0], _I32), ir.Constant(_I32, 16)), _F32)

    return types.float32(stored), generate


@intrinsic
def narrow(typingctx: Any, value: Any, like: Any) -> tuple[Any, Any]:
    """Return a float32 as `like` is stored, rounded to nearest even; NaN stays NaN."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if like == types.float32:
            return args[0]
        number = args[0]
        bits = builder.bitcast(number, _I32)
        odd = builder.and_(builder.lshr(bits, ir.Constant(_I32, 16)), ir.Constant(_I32, 1))
        rounded = builder.add(builder.add(bits, ir.Constant(_I32, 0x7FFF)), odd)
        top = builder.trunc(builder.lshr(rounded, ir.Constant(_I32, 16)), _I16)
        return builder.select(builder.fcmp_unordered("uno", number, number), ir.Constant(_I16, 0x7FC0), top)

    return like(types.float32, like), generate


def _emit_exp(builder: Any, x: Any) -> Any:
    """Emit e**x to 2 ulp (Cephes' expf): 0 below -87.3, infinity above 88.3, NaN of NaN."""
    kind = x.type
    vector = isinstance(kind, ir.VectorType)
    integers = ir.VectorType(_I32, LANES) if vector else _I32

    def number(value: float) -> Any:
        value = float(np.float32(value))
        return ir.Constant(kind, [value] * LANES if vector else value)

    def integer(value: int) -> Any:
        return ir.Constant(integers, [value] * LANES if vector else value)

    magic = number(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer
    shifted = fused(builder, x, number(1.4426950408889634), magic)
    n = builder.fsub(shifted, magic)
    r = fused(builder, n, number(2.12194440e-4), fused(builder, n, number(-0.693359375), x))
    p = number(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5):
        p = fused(builder, p, r, number(c))
    e = builder.fadd(fused(builder, p, builder.fmul(r, r), r), number(1.0))
    exponent = builder.add(builder.bitcast(shifted, integers), integer(127))
    scale = builder.bitcast(builder.shl(exponent, integer(23)), kind)
    result = builder.fmul(e, scale)
    result = builder.select(builder.fcmp_ordered("<", x, number(-87.3)), number(0.0), result)
    return builder.select(builder.fcmp_ordered(">", x, number(88.3)), number(np.inf), result)


@intrinsic
def exp32(typingctx: Any, x: Any) -> tuple[Any, Any]:
    return types.float32(types.float32), lambda _c, builder, _s, args: _emit_exp(builder, args[0])


def array_at(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    return cgutils.gep_inbounds(builder, context.make_array(kind)(context, builder, array).data, index)


def row_at(builder: Any, pointer: Any, stride: Any, row: Any) -> Any:
    """Emit the address of a row: one of the two sizes is a constant."""
    factors = (one if isinstance(one, ir.Value) else ir.Constant(_I64, one) for one in (stride, row))
    return cgutils.gep_inbounds(builder, pointer, builder.mul(*factors))


def vector_at(builder: Any, pointer: Any, at: int, kind: Any) -> Any:
    """Emit the load of a number or vector of type `kind`, `at` elements after `pointer`."""
    place = cgutils.gep_inbounds(builder, pointer, ir.Constant(_I64, at))
    return builder.load(builder.bitcast(place, kind.as_pointer()), align=1)


def _load_lanes(builder: Any, pointer: Any, kind: Any, vector: Any = _VECTOR) -> Any:
    """Load stored numbers as a vector of float32, by default 32."""
    if kind.dtype == types.float32:
        return builder.load(builder.bitcast(pointer, vector.as_pointer()), align=4)
    count = vector.count
    stored = builder.load(builder.bitcast(pointer, ir.VectorType(_I16, count).as_pointer()), align=2)
    wide = builder.zext(stored, ir.VectorType(_I32, count))
    return builder.bitcast(builder.shl(wide, ir.Constant(wide.type, [16] * count)), vector)


def _store_lanes(builder: Any, vector: Any, pointer: Any) -> None:
    builder.store(vector, builder.bitcast(pointer, _VECTOR.as_pointer()), align=4)


def splat(builder: Any, number: Any, kind: Any) -> Any:
    """Emit a vector of type `kind` that holds `number` everywhere."""
    nothing = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(nothing, number, ir.Constant(_I32, 0))
    zeros = ir.Constant(ir.VectorType(_I32, kind.count), [0] * kind.count)
    return builder.shuffle_vector(first, nothing, zeros)


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Emit a * b + c, rounded once, of float32 or vectors of them."""
    kind = a.type
    name = f"llvm.fma.v{kind.count}f32" if isinstance(kind, ir.VectorType) else "llvm.fma.f32"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
    return builder.call(function, [a, b, c])


def switch_rows(builder: Any, count: Any, most: int, emit: Callable[[int], None]) -> None:
    """Emit `emit(rows)` for each number of rows up to `most`, and a switch that runs the one for `count`."""
    done = builder.append_basic_block("done")
    choice = builder.switch(count, done)
    for rows in range(1, most + 1):
        block = builder.append_basic_block(f"rows{rows}")
        choice.add_case(ir.Constant(_I64, rows), block)
        with builder.goto_block(block):
            emit(rows)
            builder.branch(done)
    builder.position_at_end(done)


def prefetch(builder: Any, pointer: Any) -> None:
    """Prefetch the cache line at `pointer` into the second level: it is read a block later."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    read, second_level, data = (ir.Constant(_I32, number) for number in (0, 2, 1))
    builder.call(prefetch, [builder.bitcast(pointer, byte), read, second_level, data])


def has_wide_registers() -> bool:
    """Return True on a CPU with the 32 registers of AVX-512; AVX2 has 16 of half the size."""
    return bool(binding.get_host_cpu_features().get("avx512f"))


def _register_tiles(rows: int) -> Iterator[tuple[range, range]]:
    """Yield parts of a tile, rows and columns, that fit the registers. A part's sums are one chain each."""
    high, wide = (TILE_ROWS, LANES) if has_wide_registers() or rows <= _ROWS_OF_32 else (_ROWS_OF_16, 16)
    for column in range(0, LANES, wide):
        for row in range(0, rows, high):
            yield range(row, min(row + high, rows)), range(column, column + wide)


def _emit_tile(
    builder: Any,
    rows: range,
    columns: range,
    a: Any,
    a_stride: Any,
    b: Any,
    b_kind: Any,
    b_stride: Any,
    ahead: Any,
    steps: Any,
    c: Any,
    c_stride: Any,
    add: bool,
) -> None:
    """Emit c[m, columns] = sum over i < steps of a[m, i] * b[i, columns] for m of rows; onto c if `add`.

    Each step prefetches the same row of what lies at `ahead`: the CPU cannot predict scattered blocks.
    """
    vector = ir.VectorType(_F32, len(columns))
    shift = ir.Constant(_I64, columns.start)
    sums = [cgutils.alloca_once(builder, vector) for _ in rows]
    ends = [
        builder.bitcast(
            cgutils.gep_inbounds(builder, row_at(builder, c, c_stride, m), shift), vector.as_pointer()
        )
        for m in rows
    ]
    starts = [row_at(builder, a, a_stride, m) for m in rows]
    for total, end in zip(sums, ends, strict=True):
        builder.store(builder.load(end, align=4) if add else ir.Constant(vector, [0.0] * len(columns)), total)
    # 32 float32 are two cache lines, 32 bfloat16 one.
    lines = range(0, LANES, LANES // 2 if b_kind.dtype == types.float32 else LANES)
    with cgutils.for_range(builder, steps) as loop:
        row = builder.mul(loop.index, b_stride)
        for line in [line for line in lines if rows.start == 0 and line in columns]:
            at = builder.add(row, ir.Constant(_I64, line))
            prefetch(builder, cgutils.gep_inbounds(builder, ahead, at))
        lanes = _load_lanes(
            builder, cgutils.gep_inbounds(builder, b, builder.add(row, shift)), b_kind, vector
        )
        for total, start in zip(sums, starts, strict=True):
            factor = splat(builder, builder.load(cgutils.gep_inbounds(builder, start, loop.index)), vector)
            builder.store(fused(builder, factor, lanes, builder.load(total)), total)
    for total, end in zip(sums, ends, strict=True):
        builder.store(builder.load(total), end, align=4)


def _tile_product(add: bool) -> Callable[..., Any]:
    @intrinsic
    def product(
        typingctx: Any,
        rows: Any,
        a: Any,
        a_at: Any,
        a_stride: Any,
        b: Any,
        b_at: Any,
        b_stride: Any,
        ahead_at: Any,
        steps: Any,
        c: Any,
        c_at: Any,
        c_stride: Any,
    ) -> tuple[Any, Any]:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            count, a_, a_at_, a_stride_, b_, b_at_, b_stride_, ahead_at_, *others = args
            steps_, c_, c_at_, c_stride_ = others
            left = array_at(context, builder, a, a_, a_at_)
            right = array_at(context, builder, b, b_, b_at_)
            ahead = array_at(context, builder, b, b_, ahead_at_)
            out = array_at(context, builder, c, c_, c_at_)
            operands = (left, a_stride_, right, b, b_stride_, ahead, steps_, out, c_stride_, add)

            def emit(tile_rows: int) -> None:
                for parts in _register_tiles(tile_rows):
                    _emit_tile(builder, *parts, *operands)

            switch_rows(builder, count, TILE_ROWS, emit)
            return context.get_dummy_value()

        index = types.int64
        sizes = (index, index, index, index)
        return types.void(index, a, index, index, b, *sizes, c, index, index), generate

    return product


# c[m, 0:32] = sum of a[m, i] * b[i, 0:32] for m < rows <= TILE_ROWS; offsets and strides count elements.
# The data at `ahead_at` of b is prefetched.
multiply = _tile_product(add=False)
multiply_onto = _tile_product(add=True)


@intrinsic
def raise_lanes(typingctx: Any, lanes: Any, numbers: Any, at: Any) -> tuple[Any, Any]:
    """Set lanes[i] to the larger of lanes[i] and numbers[at + i], for 32 float32; ignores NaN."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        held = array_at(context, builder, lanes, args[0], ir.Constant(_I64, 0))
        known = _load_lanes(builder, held, lanes)
        other = _load_lanes(builder, array_at(context, builder, numbers, args[1], args[2]), numbers)
        _store_lanes(builder, builder.select(builder.fcmp_ordered(">", other, known), other, known), held)
        return context.get_dummy_value()

    return types.void(lanes, numbers, types.int64), generate


@intrinsic
def weigh_lanes(typingctx: Any, lanes: Any, numbers: Any, at: Any, top: Any) -> tuple[Any, Any]:
    """Set numbers[at + i] to e**(numbers[at + i] - top) and add it to lanes[i], for 32 float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        held = array_at(context, builder, lanes, args[0], ir.Constant(_I64, 0))
        place = array_at(context, builder, numbers, args[1], args[2])
        below = builder.fsub(_load_lanes(builder, place, numbers), splat(builder, args[3], _VECTOR))
        weights = _emit_exp(builder, below)
        _store_lanes(builder, weights, place)
        _store_lanes(builder, builder.fadd(_load_lanes(builder, held, lanes), weights), held)
        return context.get_dummy_value()

    return types.void(lanes, numbers, types.int64, types.float32), generate
