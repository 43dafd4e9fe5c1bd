"""Measure a traced step: the time of its forward pass, and the part that this rank computed."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from galley.core.step import StepTrace
from galley.engine.parallel.ranks import Ranks


def watched(forward: Callable[[], Tensor], ranks: Ranks, watch: StepTrace) -> Tensor:
    """Return the result of `forward` once the device has finished it; write the times into `watch`."""
    began_ns = time.perf_counter_ns()
    with ranks.waits() as waits:
        logits = forward()
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
    watch.forward_ns = time.perf_counter_ns() - began_ns
    own_ns = max(0, watch.forward_ns - waits.ns)
    watch.rank_ns = lambda: (own_ns,)
    return logits
