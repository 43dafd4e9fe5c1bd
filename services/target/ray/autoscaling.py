"""Decide how many replicas the load needs, from queue depth and free KV blocks.

Serve's own measure, ongoing requests, is 0 here: requests do not pass through Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

POLICY = "services.target.ray.autoscaling:scale_targets"
QUEUE_DEPTH = "queue_depth"
KV_FREE_SHARE = "kv_free_share"

# One replica more above BUSY_QUEUE or below SCARCE_KV_SHARE; one fewer below IDLE_QUEUE and above PLENTY.
BUSY_QUEUE = 8.0
SCARCE_KV_SHARE = 0.10
IDLE_QUEUE = 0.5
PLENTY_KV_SHARE = 0.60


def replicas_for(loads: Sequence[tuple[float, float]], running: int) -> int:
    """Return how many replicas the loads need: the queue depth and the free share of KV blocks of each.

    Add one where the mean replica is busy or short of KV; remove one where it idles. A new replica takes
    seconds to take load, and its share of the load is known only then.
    """
    if not loads:
        return running
    queue, free = (sum(values) / len(loads) for values in zip(*loads, strict=True))
    if queue > BUSY_QUEUE or free < SCARCE_KV_SHARE:
        return running + 1
    if queue < IDLE_QUEUE and free > PLENTY_KV_SHARE:
        return max(1, running - 1)
    return running


def scale_targets(ctx: Any) -> tuple[int, dict[str, Any]]:
    """Return the target number of replicas; Serve applies the AutoscalingConfig's bounds and delays."""
    if ctx.current_num_replicas < ctx.target_num_replicas:
        return ctx.target_num_replicas, {}  # the last one is still loading
    metrics = ctx.aggregated_metrics or {}
    queues, frees = metrics.get(QUEUE_DEPTH, {}), metrics.get(KV_FREE_SHARE, {})
    loads = [(queues[replica], frees[replica]) for replica in queues if replica in frees]
    return replicas_for(loads, ctx.target_num_replicas), {}
