"""Transfers between the host and a device: one pinned buffer each way, so that uploads do not block."""

from __future__ import annotations

import torch
from torch import Tensor


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
