"""Linear layers with float weights, multiplied by our own kernel: any number of rows keeps a row's bits.

A step of few rows is bound by reading the weights: bfloat16 ones take half the time of float32 ones, also on
a CPU that must widen them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from galley.engine.cpu.kernels import linear as linear_kernels
from galley.engine.cpu.kernels import openmp, ops
from galley.engine.cpu.kernels.compile import compile_kernels
from galley.engine.cpu.kernels.linear import TILE, Tile
from galley.engine.paged import as_array

# Approximate time to read a weight, and to multiply it for a row.
_READ_NS, _MULTIPLY_NS = 0.1, 0.02
# Rows from which widening a tile of weights in advance pays off.
_MANY_ROWS = 24
_TRIAL_ERROR = 0.02


@dataclass(frozen=True, slots=True)
class FloatProduct:
    """Multiply [..., inputs] by float weights into [..., outputs], each row by itself.

    Rows are multiplied in float32; those of another dtype are converted there and back.
    """

    weights: Any
    biases: Any
    outputs: int
    depth: int

    def __call__(self, rows: Tensor) -> Tensor:
        if rows.dtype != torch.float32 or rows.dim() > 2:
            flat = self(rows.float().reshape(-1, rows.shape[-1]))
            return flat.to(rows.dtype).view(*rows.shape[:-1], self.outputs)
        given = pad(rows, (0, 1)) if rows.shape[1] % self.depth else rows
        return self._multiplied(given)

    def _multiplied(self, rows: Tensor) -> Tensor:
        count, inputs = rows.shape
        out = torch.empty(count, self.outputs, dtype=torch.float32)
        threads = openmp.worth(openmp.threads(), inputs * self.outputs * (_READ_NS + _MULTIPLY_NS * count))
        run = _compiled()[self.depth > 1 and count >= _MANY_ROWS]
        run(
            threads, TILE.rows, TILE.outputs, self.depth, as_array(rows), self.weights, self.biases,
            as_array(out),
        )  # fmt: skip
        return out


def can_multiply(dtype: torch.dtype) -> bool:
    """Return True if the kernel multiplies by weights of `dtype` on this CPU.

    With instructions for bfloat16, oneDNN multiplies it; our kernel was not measured beside it there.
    """
    flags = torch.cpu.get_capabilities()
    if not (flags.get("avx2") and flags.get("fma3")) or dtype not in {torch.float32, torch.bfloat16}:
        return False
    if dtype == torch.bfloat16 and (flags.get("amx_bf16") or flags.get("avx512_bf16")):
        return False
    return is_right(dtype)


def float_product(weight: Tensor, bias: Tensor | None) -> FloatProduct:
    """Return the product of rows by a weight [outputs, inputs]."""
    outputs = len(weight)
    weights, depth = packed(weight, TILE)
    biases: Any = (torch.zeros(outputs) if bias is None else bias.float()).numpy()
    return FloatProduct(weights, biases, outputs, depth)


def packed(weight: Tensor, tile: Tile) -> tuple[Any, int]:
    """Return the numbers of [outputs, inputs] in the kernel's order, and the inputs of a step."""
    outputs, inputs = weight.shape
    depth = 2 if weight.dtype == torch.bfloat16 else 1
    padded = pad(weight, (0, inputs % depth, 0, -outputs % tile.outputs))
    blocks = padded.view(-1, tile.outputs, padded.shape[1] // depth, depth).transpose(1, 2)
    return as_array(blocks.contiguous().flatten()), depth


@cache
def is_right(dtype: torch.dtype) -> bool:
    """Return True if a small product is near torch's: a CPU may lack what it says that it has."""
    generator = torch.Generator().manual_seed(0)
    weight, rows = (torch.randn(size, 64, generator=generator).to(dtype) for size in (100, 9))
    run = float_product(weight, None)
    expected = linear(rows.double(), weight.double())
    return float((run(rows) - expected).norm() / expected.norm()) < _TRIAL_ERROR


@cache
def _compiled() -> Sequence[Callable[..., None]]:
    """Return the kernel, and the one for many rows."""
    functions = (linear_kernels.linear, linear_kernels.linear_many)
    return compile_kernels("linear", functions, (linear_kernels, ops, openmp))
