"""How long a forward took, and how much of that this rank computed; asked of a pass that is traced."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from galley.core.step import StepTrace
from galley.engine.parallel.ranks import Ranks


def watched(forward: Callable[[], Tensor], ranks: Ranks, watch: StepTrace) -> Tensor:
    """What `forward` returns, once it is there: a device is waited for. `watch` is told of this rank."""
    began_ns = time.perf_counter_ns()
    with ranks.waits() as waits:
        logits = forward()
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
    watch.forward_ns = time.perf_counter_ns() - began_ns
    own_ns = max(0, watch.forward_ns - waits.ns)
    watch.rank_ns = lambda: (own_ns,)
    return logits
