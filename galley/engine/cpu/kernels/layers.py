"""The CPU kernels of a Llama layer between its products; arrays as in `attention`."""

# ruff: noqa: ARG001, PLR0913, PLR0917  # kernels take arrays and sizes, not objects; loops which thread they run on

from __future__ import annotations

import math

import numpy as np

from galley.engine.cpu.kernels.attention import Floats, Ints, Stored
from galley.engine.cpu.kernels.openmp import shared
from galley.engine.cpu.kernels.ops import LANES, exp32, fma, helper, narrow, widen

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@helper
def _mean_square(numbers: Floats, at: int, count: int, lanes: Floats) -> np.float32:
    """Return the mean square of numbers[at : at + count], in 32 running sums."""
    for i in range(LANES):
        lanes[i] = _ZERO
    whole = count // LANES * LANES
    for start in range(at, at + whole, LANES):
        for i in range(LANES):
            lanes[i] = fma(numbers[start + i], numbers[start + i], lanes[i])
    for i in range(count - whole):
        lanes[i] = fma(numbers[at + whole + i], numbers[at + whole + i], lanes[i])
    total = _ZERO
    for i in range(LANES):
        total += lanes[i]
    return total / np.float32(count)


@shared
def _normalize(
    thread: int,
    first: int,
    last: int,
    residual: Floats,
    part: Stored,
    weight: Floats,
    eps: np.float32,
    out: Stored,
) -> None:
    hidden = out.shape[1]
    lanes = np.empty(LANES, np.float32)
    flat = residual.reshape(-1)
    for row in range(first, last):
        if len(part) > 0:
            for i in range(hidden):
                residual[row, i] += widen(part[row, i])
        mean = _mean_square(flat, row * hidden, hidden, lanes)
        scale = _ONE / np.float32(math.sqrt(mean + eps))
        for i in range(hidden):
            out[row, i] = narrow(residual[row, i] * scale * weight[i], out[0, 0])


def normalize(
    threads: int, residual: Floats, part: Stored, weight: Floats, eps: np.float32, out: Stored
) -> None:
    """Write RMSNorm (arXiv 1910.07467) of float32 [rows, hidden] times weight [hidden] to stored `out`.

    Adds the stored `part` [rows, hidden], if it has rows, to the residual first.
    """
    _normalize(threads, len(out), residual, part, weight, eps, out)


def rotations(
    positions: Ints, frequencies: Floats, scale: np.float32, cosines: Floats, sines: Floats
) -> None:
    """Write cos and sin, times `scale`, of position times frequency: float32 [rows, key_dim / 2]."""
    for row in range(len(positions)):
        for i in range(len(frequencies)):
            angle = np.float32(positions[row]) * frequencies[i]
            cosines[row, i] = np.float32(math.cos(angle)) * scale
            sines[row, i] = np.float32(math.sin(angle)) * scale


@helper
def _load_head(
    qkv: Stored, row: int, at: int, norm: Floats, eps: np.float32, head: Floats, lanes: Floats
) -> None:
    """Load one head as float32, normalized if `norm` holds weights (Qwen3)."""
    for d in range(len(head)):
        head[d] = widen(qkv[row, at + d])
    if len(norm) > 0:
        factor = _ONE / np.float32(math.sqrt(_mean_square(head, 0, len(head), lanes) + eps))
        for d in range(len(head)):
            head[d] = head[d] * factor * norm[d]


@shared
def _rotate_store(
    thread: int,
    first: int,
    last: int,
    qkv: Stored,
    query_norm: Floats,
    key_norm: Floats,
    eps: np.float32,
    cosines: Floats,
    sines: Floats,
    scale: np.float32,
    places: Ints,
    queries: Floats,
    keys: Stored,
    values: Stored,
    value_dim: int,
) -> None:
    kv_heads, _, group, dim = queries.shape
    half = dim // 2
    lanes, head = np.empty(LANES, np.float32), np.empty(dim, np.float32)
    key_at = kv_heads * group * dim
    value_at = key_at + kv_heads * dim
    for row in range(first, last):
        block, slot = places[row]
        for h in range(kv_heads):
            for g in range(group):
                _load_head(qkv, row, (h * group + g) * dim, query_norm, eps, head, lanes)
                for d in range(half):
                    x, y, c, s = head[d], head[d + half], cosines[row, d], sines[row, d]
                    queries[h, row, g, d] = (x * c - y * s) * scale
                    queries[h, row, g, d + half] = (y * c + x * s) * scale
            _load_head(qkv, row, key_at + h * dim, key_norm, eps, head, lanes)
            for d in range(half):
                x, y, c, s = head[d], head[d + half], cosines[row, d], sines[row, d]
                keys[block, h, d, slot] = narrow(x * c - y * s, keys[0, 0, 0, 0])
                keys[block, h, d + half, slot] = narrow(y * c + x * s, keys[0, 0, 0, 0])
            for d in range(value_dim):
                value = widen(qkv[row, value_at + h * value_dim + d])
                values[block, h, slot, d] = narrow(value, values[0, 0, 0, 0])


def rotate_store(
    threads: int,
    qkv: Stored,
    query_norm: Floats,
    key_norm: Floats,
    eps: np.float32,
    cosines: Floats,
    sines: Floats,
    scale: np.float32,
    places: Ints,
    queries: Floats,
    keys: Stored,
    values: Stored,
    value_dim: int,
) -> None:
    """Split the fused product into rotated (arXiv 2104.09864), scaled queries and the pool's keys and values.

    qkv: stored [rows, heads * key_dim + kv_heads * (key_dim + value_dim)]; the norms: float32 [key_dim], or
    empty; others as in `rotations`, `store`.
    """
    _rotate_store(
        threads, len(places),
        qkv, query_norm, key_norm, eps, cosines, sines, scale, places, queries, keys, values, value_dim,
    )  # fmt: skip


@shared
def _gate(thread: int, first: int, last: int, gate_up: Stored, out: Stored) -> None:
    inner = out.shape[1]
    for row in range(first, last):
        for i in range(inner):
            x = widen(gate_up[row, i])
            y = widen(gate_up[row, inner + i])
            out[row, i] = narrow(x / (_ONE + exp32(-x)) * y, out[0, 0])


def gate(threads: int, gate_up: Stored, out: Stored) -> None:
    """Write SiLU(gate) * up (arXiv 2002.05202) of stored [rows, 2 * inner] to stored [rows, inner]."""
    _gate(threads, len(out), gate_up, out)
