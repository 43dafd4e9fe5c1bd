"""Linear layers with int8 weights, multiplied as int8 where the CPU can.

A step of few rows is bound by reading its weights from memory: int8 halves what bfloat16 reads. Rows are
rounded to int8 too, so that a step of many rows multiplies faster than in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import binding
from torch import Tensor, nn
from torch.nn.functional import pad

from galley.engine.cpu.kernels import int8 as int8_kernels
from galley.engine.cpu.kernels import openmp, ops
from galley.engine.cpu.kernels.compile import compile_kernels
from galley.engine.cpu.kernels.int8 import AVX2, GROUP, VNNI, Instructions
from galley.engine.paged import as_array

# Approximate time of one weight with one row.
_WEIGHT_NS = 0.007
_LARGEST = 127


class Int8Linear(nn.Linear):
    """A layer that also holds its weight as int8 [outputs, inputs] times float32 [outputs]."""

    def __init__(
        self, weight: Tensor, bytes_: Tensor, scales: Tensor, bias: nn.Parameter | None = None
    ) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_parameter("bias", bias)
        # Not buffers: they must not move, and only our own forward reads them.
        self.stored = (bytes_, scales)


@dataclass(frozen=True, slots=True)
class Int8Product:
    """Multiply [rows, inputs] by int8 weights into [rows, outputs] of `dtype`, each row by itself."""

    weights: Any
    scales: Any
    biases: Any
    outputs: int
    dtype: torch.dtype
    by: Instructions

    def __call__(self, rows: Tensor) -> Tensor:
        out = torch.empty(len(rows), self.outputs, dtype=self.dtype)
        numbers = np.empty(tuple(rows.shape), np.int8 if self.by is VNNI else np.int16)
        threads = openmp.worth(openmp.threads(), rows.numel() * self.outputs * _WEIGHT_NS)
        _compiled()(
            threads, self.by.tile_rows, self.by.outputs, as_array(rows), numbers, self.weights, self.scales,
            self.biases, as_array(out),
        )  # fmt: skip
        return out


def int8_product(layers: Sequence[nn.Linear], dtype: torch.dtype) -> Int8Product | None:
    """Return int8 layers of one input as one product, outputs side by side; None if that is not supported."""
    by = instructions()
    held = [layer for layer in layers if isinstance(layer, Int8Linear)]
    if len(held) < len(layers) or by is None or layers[0].in_features % GROUP:
        return None
    bytes_ = torch.cat([layer.stored[0] for layer in held])
    scales = torch.cat([layer.stored[1] for layer in held])
    outputs, inputs = bytes_.shape
    unsigned = pad(bytes_.to(torch.int16) + 128, (0, 0, 0, -outputs % by.outputs)).to(torch.uint8)
    blocks = unsigned.view(-1, by.outputs, inputs // by.depth, by.depth).transpose(1, 2)
    return Int8Product(
        weights=blocks.contiguous().flatten().numpy(),
        scales=scales.numpy(),
        biases=torch.cat([_bias(layer) for layer in held]).numpy(),
        outputs=outputs,
        dtype=dtype,
        by=by,
    )


def _bias(layer: Any) -> Tensor:
    bias: Tensor = torch.zeros(layer.out_features) if layer.bias is None else layer.bias.detach().float()
    return bias


def instructions() -> Instructions | None:
    """Return the instructions of this CPU that the kernels use; None if it has none of them."""
    flags = binding.get_host_cpu_features()
    if flags.get("avx512vnni"):
        return VNNI
    return AVX2 if flags.get("avx2") else None


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 rows and float32 scales [rows]; symmetric, each row's largest number becomes 127."""
    wide = weight.float()
    scale = wide.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / _LARGEST
    return (wide / scale[:, None]).round().to(torch.int8), scale


@torch.inference_mode()
def quantize_linears(module: nn.Module) -> None:
    """Replace each nn.Linear below `module` by an Int8Linear."""
    for name, layer in [found for found in module.named_modules() if type(found[1]) is nn.Linear]:
        weight = layer.weight.detach()
        bytes_, scales = quantized(weight)
        # The module itself computes with the rounded weights: loading compares our forward with it.
        widened = (bytes_ * scales[:, None]).to(weight.dtype)
        module.set_submodule(name, Int8Linear(widened, bytes_, scales, layer.bias))


@cache
def _compiled() -> Callable[..., None]:
    return compile_kernels("int8", (int8_kernels.linear,), (int8_kernels, ops, openmp))[0]
