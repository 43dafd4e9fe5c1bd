"""Weights of linear layers reordered once for oneDNN: a step on the CPU spends its time there.

The operators are private to torch (inductor's freezing uses them). They are used where they exist and give a
row the same bits among any number of rows, which is tried for each shape.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_OPS: Any = torch.ops.mkldnn
_ROWS_TRIED = (4, 5, 8, 16, 33, 80, 512)


def native_bfloat16() -> bool:
    """Does this CPU multiply bfloat16 itself?"""
    flags = torch.cpu.get_capabilities()
    return bool(flags.get("avx512_bf16") or flags.get("amx_bf16"))


def serves(dtype: torch.dtype, device: str) -> bool:
    """Are the operators there for this dtype and device?"""
    there = hasattr(_OPS, "_reorder_linear_weight") and hasattr(_OPS, "_linear_pointwise")
    computed = dtype == torch.float32 or (dtype == torch.bfloat16 and native_bfloat16())
    return there and torch.device(device).type == "cpu" and computed


class PackedLinear(nn.Module):
    """`nn.Linear` for inference, with its weights packed."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._packed = _OPS._reorder_linear_weight(linear.weight.detach())  # noqa: SLF001
        bias = dict(linear.named_parameters()).get("bias")
        self._bias = None if bias is None else bias.detach()

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        result: Tensor = _OPS._linear_pointwise(rows, self._packed, self._bias, "none", [], "")  # noqa: SLF001
        return result


@torch.inference_mode()
def pack_linears(module: nn.Module) -> None:
    """Replace every plain nn.Linear below `module`, where that keeps its rows independent of one another."""
    known: dict[tuple[int, int], bool] = {}
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear:
                continue
            packed = PackedLinear(child)
            shape = (child.out_features, child.in_features)
            if shape not in known:
                known[shape] = _keeps_rows(packed, child.weight.dtype)
            if known[shape]:
                setattr(parent, name, packed)


def _keeps_rows(packed: PackedLinear, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_ROWS_TRIED[-1], packed.in_features, generator=generator).to(dtype)
    whole = packed(rows)
    return all(torch.equal(packed(rows[:count]), whole[:count]) for count in _ROWS_TRIED)
