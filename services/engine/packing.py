"""Weights of linear layers reordered once for oneDNN, which a bfloat16 step on the CPU spends its time on.

The operators are private to torch (inductor's freezing uses them), so they are used only where they are there
and give the same bits for any number of rows, which is tried when a layer is packed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_OPS: Any = torch.ops.mkldnn
_ROWS_TRIED = (4, 5, 8, 16, 33)


class PackedLinear(nn.Module):
    """`nn.Linear` for inference in bfloat16 on the CPU."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._packed = _OPS._reorder_linear_weight(linear.weight.detach())  # noqa: SLF001
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        result: Tensor = _OPS._linear_pointwise(rows, self._packed, self._bias, "none", [], "")  # noqa: SLF001
        return result
