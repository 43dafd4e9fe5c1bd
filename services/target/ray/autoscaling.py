"""How many replicas a load needs: read from queue depth and free KV blocks, which say what requests cannot.

Serve's own measure, ongoing requests, sees nothing here: requests do not pass through Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

QUEUE_DEPTH = "queue_depth"
KV_FREE_SHARE = "kv_free_share"

# Above either of the first two, or below either of the last two, one replica more or less.
BUSY_QUEUE = 8.0
SCARCE_KV_SHARE = 0.10
IDLE_QUEUE = 0.5
PLENTY_KV_SHARE = 0.60


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """Of one replica: sessions that wait for a pass, and which share of its KV blocks is free."""

    queue_depth: float
    kv_free_share: float


def wanted_replicas(loads: Sequence[ReplicaLoad], running: int) -> int:
    """One more where the mean replica is busy or short of KV, one fewer where it idles with plenty of both.

    Steps of one: a new replica takes seconds to be felt, and its share of the load is known only then.
    """
    if not loads:
        return running
    queue = sum(load.queue_depth for load in loads) / len(loads)
    free = sum(load.kv_free_share for load in loads) / len(loads)
    if queue > BUSY_QUEUE or free < SCARCE_KV_SHARE:
        return running + 1
    if queue < IDLE_QUEUE and free > PLENTY_KV_SHARE:
        return max(1, running - 1)
    return running


def scale_targets(ctx: Any) -> tuple[int, dict[str, Any]]:
    """Ray Serve's autoscaling policy; bounds and delays of the AutoscalingConfig are applied by Serve."""
    if ctx.current_num_replicas < ctx.target_num_replicas:
        return ctx.target_num_replicas, {}  # the last one is still loading, and relieves nobody yet
    metrics = ctx.aggregated_metrics or {}
    queues, frees = metrics.get(QUEUE_DEPTH, {}), metrics.get(KV_FREE_SHARE, {})
    loads = [ReplicaLoad(queues[replica], frees[replica]) for replica in queues if replica in frees]
    return wanted_replicas(loads, ctx.target_num_replicas), {}
