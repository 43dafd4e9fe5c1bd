"""Our products of float weights: near torch's, the same bits among any rows and on any number of threads."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from galley.engine.cpu import packing, product
from galley.engine.cpu.kernels import linear as kernels
from galley.engine.cpu.kernels import openmp
from galley.engine.cpu.kernels.linear import AVX2, AVX512, Tile
from galley.engine.cpu.product import FloatProduct, float_product, packed
from tests.fakes.model_configs import CONFIGS, load, tokens_of, whole

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if product.can_multiply(dtype)]
# Not multiples of a tile's outputs or of two inputs.
SHAPES = [(64, 64), (100, 33), (7, 130)]
MOST_ROWS = 60
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def some(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def product_of(dtype: torch.dtype, shape: tuple[int, int]) -> tuple[FloatProduct, Tensor, Tensor]:
    weight, bias = some(*shape).to(dtype), some(shape[0], seed=1).to(dtype)
    return float_product(weight, bias), weight, bias


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_product_is_near_torchs_and_keeps_a_rows_bits_among_any_rows(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    run, weight, bias = product_of(dtype, shape)
    rows = some(MOST_ROWS, shape[1], seed=2).to(dtype)
    whole = run(rows)
    assert whole.dtype == dtype
    expected = linear(rows.double(), weight.double(), bias.double())
    assert float((whole - expected).norm() / expected.norm()) < _TOLERANCE[dtype]
    for count in range(1, MOST_ROWS):
        first = (7 * count) % (MOST_ROWS - count)
        assert torch.equal(run(rows[first : first + count]), whole[first : first + count]), count
    assert torch.equal(run(rows.view(3, -1, shape[1])), whole.view(3, -1, shape[0]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_more_threads_change_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _, _ = product_of(dtype, (100, 64))
    few, many = some(3, 64).to(dtype), some(MOST_ROWS, 64).to(dtype)
    expected = run(few), run(many)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(openmp, "_WORTH_NS", 0)
    assert torch.equal(run(few), expected[0])
    assert torch.equal(run(many), expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_registers_of_a_cpu_change_no_bit_of_float32_rows(dtype: torch.dtype) -> None:
    """A CPU with AVX2 runs the tile of AVX-512 as well, in halves."""
    weight, rows = some(96, 20).to(dtype), some(4, 20, seed=3).numpy()

    def summed(by: Tile) -> Any:
        weights, depth = packed(weight, by)
        sum_tile, steps = kernels.tile_sum(by), rows.shape[1] // depth

        @numba.njit
        def run(numbers: Any, weights: Any, at: int, sums: Any) -> None:
            sum_tile(4, numbers, 0, 20, weights, at, steps, sums)

        parts = []
        for at in range(0, len(weight), by.outputs):
            sums = np.empty(by.rows * by.outputs, np.float32)
            run(rows.ravel(), weights, at * rows.shape[1], sums)
            parts.append(sums[: len(rows) * by.outputs].reshape(len(rows), -1))
        return np.concatenate(parts, axis=1)

    expected = linear(torch.from_numpy(rows), weight.float()).numpy()
    assert np.allclose(summed(AVX2), expected, atol=1e-4)
    assert np.array_equal(summed(AVX2), summed(AVX512))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cpu_whose_products_are_wrong_runs_others(
    dtype: torch.dtype, make_model: Callable[[Any], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = FloatProduct.__call__
    monkeypatch.setattr(FloatProduct, "__call__", lambda self, rows: 1.1 * wrong(self, rows))
    product.is_right.cache_clear()
    try:
        assert packing.kind(dtype, "cpu") != "own"
        model = load(make_model(CONFIGS["llama"]()), dtype)
    finally:
        product.is_right.cache_clear()
    forward: Any = model._forward
    assert FloatProduct not in {type(one) for one in forward._products()}
    assert model.info.deterministic


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_step_computes_exactly_its_rows(
    dtype: torch.dtype, make_model: Callable[[Any], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(make_model(CONFIGS["llama"]()), dtype)
    given, run = set(), FloatProduct.__call__

    def watched(self: FloatProduct, rows: Tensor) -> Tensor:
        given.add(len(rows))
        return run(self, rows)

    monkeypatch.setattr(FloatProduct, "__call__", watched)
    for rows in (1, 3, 67):
        whole(model, tokens_of(random.Random(rows), rows))
    assert given == {1, 3, 67}
