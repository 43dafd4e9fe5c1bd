"""Linear layers with int8 weights, multiplied as int8 where the CPU can.

A step of a small draft is bound by reading its weights from memory: int8 halves what bfloat16 reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from llvmlite import binding
from torch import Tensor, nn

from galley.engine.cpu.kernels import int8 as int8_kernels
from galley.engine.cpu.kernels import openmp, ops
from galley.engine.cpu.kernels.compile import compile_kernels
from galley.engine.cpu.kernels.int8 import DEPTH, GROUP, OUTPUTS
from galley.engine.paged import as_array

# Approximate time of one weight with one row.
_WEIGHT_NS = 0.007


class Int8Linear(nn.Linear):
    """A layer without bias that also holds its weight as int8 [outputs, inputs] times float32 [outputs]."""

    def __init__(self, weight: Tensor, bytes_: Tensor, scales: Tensor) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        # Not buffers: they must not move, and only our own forward reads them.
        self.stored = (bytes_, scales)


@dataclass(frozen=True, slots=True)
class Int8Product:
    """Multiply [rows, inputs] by int8 weights into [rows, outputs] of `dtype`, each row by itself."""

    weights: Any
    scales: Any
    inputs: int
    dtype: torch.dtype

    def __call__(self, rows: Tensor) -> Tensor:
        out = torch.empty(len(rows), len(self.scales), dtype=self.dtype)
        threads = openmp.worth(openmp.threads(), len(rows) * self.inputs * len(self.scales) * _WEIGHT_NS)
        _compiled()(threads, as_array(rows), self.weights, self.scales, as_array(out))
        return out


def int8_product(layers: Sequence[nn.Linear], dtype: torch.dtype) -> Int8Product | None:
    """Return int8 layers of one input as one product, outputs side by side; None if that is not supported."""
    stored = [layer.stored for layer in layers if isinstance(layer, Int8Linear)]
    if len(stored) < len(layers) or not is_supported():
        return None
    bytes_ = torch.cat([weight for weight, _ in stored])
    outputs, inputs = bytes_.shape
    if outputs % OUTPUTS or inputs % GROUP:
        return None
    scales = torch.cat([scale for _, scale in stored])
    unsigned = (bytes_.to(torch.int16) + 128).to(torch.uint8)
    blocks = unsigned.view(outputs // OUTPUTS, OUTPUTS, inputs // DEPTH, DEPTH).transpose(1, 2)
    return Int8Product(blocks.contiguous().flatten().numpy(), scales.numpy(), inputs, dtype)


def is_supported() -> bool:
    return bool(binding.get_host_cpu_features().get("avx512vnni"))


@cache
def _compiled() -> Callable[..., None]:
    return compile_kernels("int8", (int8_kernels.linear,), (int8_kernels, ops, openmp))[0]
