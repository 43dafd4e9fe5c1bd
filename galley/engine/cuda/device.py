"""Options of a CUDA device, which change nothing on the CPU, and transfers from and to it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Rows of every step if bits must be the same: each product and norm then has one shape.
FIXED_ROWS = 128


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """Options of a CUDA device. `flex`: attention reads pages in place, if it compiles; else plain torch.

    `graphs` (one rank only) and `invariant` (a row has the same bits in any step) need `flex`.
    """

    flex: bool = True
    graphs: bool = True
    invariant: bool = False

    def rows_of_step(self, device: str, max_rows: int) -> int:
        return max_rows if device.startswith("cpu") or not self.invariant else FIXED_ROWS


def host_buffer(numbers: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return room on the host for a transfer to or from `device`, pinned for a CUDA device.

    torch's pinning allocator reuses memory only after the copies that read it.
    """
    return torch.empty(numbers, dtype=dtype, pin_memory=device.type == "cuda")


def to_host(tensor: Tensor) -> Tensor:
    """Return the tensor on the host; waits for all work queued on this stream."""
    if tensor.device.type == "cpu":
        return tensor
    host = host_buffer(tensor.numel(), tensor.dtype, tensor.device)
    host.copy_(tensor.reshape(-1), non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host.view(tensor.shape)
