"""Between the host and a device: one buffer a way, pinned, so that the way up makes nobody wait."""

from __future__ import annotations

import torch
from torch import Tensor


def host_buffer(numbers: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room on the host for what goes to or comes from `device`: pinned where that is a CUDA device.

    torch's pinning allocator gives memory anew only when the copies that read it have been made.
    """
    return torch.empty(numbers, dtype=dtype, pin_memory=device.type == "cuda")


def to_host(tensor: Tensor) -> Tensor:
    """The same on the host; waits for all that the device still has to do on this stream."""
    if tensor.device.type == "cpu":
        return tensor
    host = host_buffer(tensor.numel(), tensor.dtype, tensor.device)
    host.copy_(tensor.reshape(-1), non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host.view(tensor.shape)
