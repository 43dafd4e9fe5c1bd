"""Linear layers with weights reordered once, for our own kernel or for oneDNN.

A step on the CPU spends its time in them. oneDNN's operators are private to torch (inductor's freezing uses
them). They serve CPUs without our kernel, where they give a row the same bits among any number of rows, which
is tried for each shape. With AMX they do so for up to 32 rows, so that more are multiplied in blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from galley.engine.cpu import product as own

Product = Callable[[Tensor], Tensor]

_OPS: Any = torch.ops.mkldnn
# Fewer rows use other kernels, which round differently: always in float32, sometimes in bfloat16.
MIN_ROWS = 4
# Up to _EXACT_ROWS a product computes exactly its rows, beyond that a multiple of a step.
_EXACT_ROWS = 16
_FEW_ROWS, _STEP_OF_FEW, _STEP_OF_MANY = 64, 2, 8
_ROWS_TRIED = (4, 5, 8, 16, 33, 35, 80, 182)
_TRIAL_ROWS = 512
_AMX_ROWS = 32


def rows_of_product(rows: int, max_rows: int) -> int:
    """Return how many rows a product of `rows` computes, at most `max_rows`: as many, or a few more.

    oneDNN compiles a product for each number of rows and keeps a thousand of them, half a megabyte each. The
    padding costs one or two hundredths of the time.
    """
    if rows <= _EXACT_ROWS:
        return rows
    step = _STEP_OF_FEW if rows <= _FEW_ROWS else _STEP_OF_MANY
    return min(max_rows, -(-rows // step) * step)


def has_native_bfloat16() -> bool:
    flags = torch.cpu.get_capabilities()
    return bool(flags.get("avx512_bf16") or flags.get("amx_bf16"))


def kind(dtype: torch.dtype, device: str) -> str:
    """Return whose products compute in `dtype`: "own", "packed" (oneDNN's) or "torch"."""
    if torch.device(device).type == "cpu" and own.can_multiply(dtype):
        return "own"
    return "packed" if can_serve(dtype, device) else "torch"


def most_rows(dtype: torch.dtype) -> int:
    """Return the most rows of which each has the same bits in one product of oneDNN; 0: any number.

    With AMX it orders the sums of more rows by their number.
    """
    has_amx = torch.cpu.get_capabilities().get("amx_bf16")
    return _AMX_ROWS if dtype == torch.bfloat16 and has_amx else 0


def can_serve(dtype: torch.dtype, device: str) -> bool:
    exists = hasattr(_OPS, "_reorder_linear_weight") and hasattr(_OPS, "_linear_pointwise")
    computed = dtype == torch.float32 or (dtype == torch.bfloat16 and has_native_bfloat16())
    return exists and torch.device(device).type == "cpu" and computed


class _WidenedLinears(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not linear or kwargs:
            return func(*args, **(kwargs or {}))
        return linear(*(one if one is None else one.float() for one in args)).to(args[0].dtype)


def torch_products(dtype: torch.dtype, device: str) -> AbstractContextManager[object]:
    """Return a context in which torch's own products are fast.

    Those of bfloat16 weights are computed in float32 on a CPU without instructions for them.
    """
    slow = dtype == torch.bfloat16 and torch.device(device).type == "cpu" and not has_native_bfloat16()
    return _WidenedLinears() if slow else nullcontext()


class PackedLinear(nn.Module):
    def __init__(self, layer: nn.Linear, product: Product) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._product = product

    def forward(self, rows: Tensor) -> Tensor:
        return self._product(rows)


class Linears:
    """A maker of linear layers, packed where that keeps rows independent; each shape is tried once.

    `rows_dtype` is the dtype of rows that products take without a conversion, `min_rows` the fewest rows that
    they must be given.
    """

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        by = kind(dtype, device)
        self._own, self._can_serve = by == "own", by == "packed"
        self.rows_dtype = torch.float32 if self._own else dtype
        self.min_rows = 1 if self._own else MIN_ROWS
        self._keeps_rows: dict[torch.Size, bool] = {}

    def make(self, weight: Tensor, bias: Tensor | None) -> Product:
        """Return a function of [rows, n] to [rows, m] for weight [m, n] and bias [m]."""
        return self.packed(weight, bias) or (lambda rows: linear(rows, weight, bias))

    def packed(self, weight: Tensor, bias: Tensor | None) -> Product | None:
        """Return `make`'s function with packed weights; None if not supported or rows affect others."""
        if self._own:
            return own.float_product(weight, bias)
        if not self._can_serve:
            return None
        product = _product_of(weight, bias)
        if weight.shape not in self._keeps_rows:
            self._keeps_rows[weight.shape] = _keeps_rows(product, weight.shape[1], weight.dtype)
        return product if self._keeps_rows[weight.shape] else None


def _product_of(weight: Tensor, bias: Tensor | None) -> Product:
    """Return oneDNN's product, of at most `most_rows` at once."""
    packed = _OPS._reorder_linear_weight(weight)  # noqa: SLF001
    run = _OPS._linear_pointwise.default  # noqa: SLF001

    def whole(rows: Tensor) -> Tensor:
        result: Tensor = run(rows, packed, bias, "none", [], "")
        return result

    most = most_rows(weight.dtype)

    def in_blocks(rows: Tensor) -> Tensor:
        blocks = -(-rows.shape[-2] // most)
        if blocks <= 1:
            return whole(rows)
        # Cut evenly: few rows use other kernels.
        return torch.cat([whole(block) for block in torch.tensor_split(rows, blocks, -2)], -2)

    return in_blocks if most else whole


@torch.inference_mode()
def pack_linears(module: nn.Module, linears: Linears) -> None:
    """Replace each nn.Linear below `module` by a packed one, where that keeps its rows independent."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                bias = dict(child.named_parameters()).get("bias")
                product = linears.packed(child.weight.detach(), None if bias is None else bias.detach())
                if product is not None:
                    setattr(parent, name, PackedLinear(child, product))


def _keeps_rows(packed: Product, features: int, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_TRIAL_ROWS, features, generator=generator).to(dtype)
    whole = packed(rows)
    return all(
        torch.equal(packed(rows[first : first + count]), whole[first : first + count])
        for count in _ROWS_TRIED
        for first in range(0, _TRIAL_ROWS - count, 192)
    )
