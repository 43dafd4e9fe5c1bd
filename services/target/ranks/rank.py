"""One rank of a sharded target: how it loads, and the process of a rank other than 0.

`python -m services.target.ranks.rank RANK ADDRESS SETTINGS` runs such a rank; it exits 1 when another rank
is lost.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from galley.common.logs import get_logger, start_logging
from galley.common.server.process import die_with_parent, limit_threads
from galley.common.tracing.telemetry import Telemetry, start_telemetry
from galley.core.errors import GalleyError
from services.target.engine.paged.loading import load_shard
from services.target.settings import TargetSettings
from services.target.spans import record_rank

if TYPE_CHECKING:
    from galley.engine.fingerprint import Build
    from galley.engine.model import CausalModel
    from galley.engine.parallel.process_group import ProcessGroup

REDIS_URL = "GALLEY_TARGET_REDIS_URL"
"""Environment variable of the store's URL on Ray: the URL may hold a password, and Ray shows arguments."""
REDIS_URL_FILE = f"{REDIS_URL}_FILE"
"""Environment variable that names a file with it on each node."""

_LOG = get_logger(__name__)
_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


# Longest time that a rank waits for the others when they meet, and in a step.
STEP_TIMEOUT_S = 30.0


def rank_settings(values: Mapping[str, Any]) -> TargetSettings:
    """Return a replica's settings for one of its ranks, which registers nowhere."""
    return TargetSettings(**{**values, "redis_url": "", "redis_url_file": ""})


def settings_for_ranks(settings: TargetSettings) -> dict[str, Any]:
    """Return plain values for `rank_settings`; they go by command lines, so they hold no secrets."""
    return settings.model_dump(mode="json", exclude={"redis_url", "redis_url_file"})


def load_rank(settings: TargetSettings, group: ProcessGroup, blocks: int) -> tuple[CausalModel, Build]:
    """Load this rank's shard; return it and its build.

    Raise UnsupportedModel, or RankLost if another rank does not get as far within `ranks_timeout_s`: hosts
    read files and compile kernels at their own pace.
    """
    group.wait_at_most(settings.ranks_timeout_s)
    loaded = load_shard(settings, blocks, group)
    group.wait_at_most(STEP_TIMEOUT_S)
    return loaded


def run_follower(settings: TargetSettings, rank: int, address: str) -> None:
    """Meet the others at rank 0's store, load, and run the steps that rank 0 sends until it stops.

    Raise RankLost when another rank is lost, UnsupportedModel where the model cannot be sharded so.
    """
    limit_threads(settings.thread_count)
    telemetry = start_telemetry("galley-target")
    try:
        _follow(settings, rank, address, telemetry)
    finally:
        telemetry.shutdown()


def _follow(settings: TargetSettings, rank: int, address: str, telemetry: Telemetry) -> None:
    from galley.engine.parallel.process_group import join  # noqa: PLC0415
    from services.target.ranks.sharded import agree, follow  # noqa: PLC0415

    group = join(
        rank,
        settings.tensor_parallel,
        device=settings.device,
        meeting=address,
        timeout_s=STEP_TIMEOUT_S,
    )
    model, _ = load_rank(settings, group, agree(group, rank, 0))
    follow(model, group, partial(record_rank, telemetry.scope(__name__), rank))
    group.close()


async def start_followers(settings: TargetSettings, address: str) -> list[asyncio.subprocess.Process]:
    """Start the processes of this host's ranks, except rank 0, which meet at `address`.

    Call from the main thread: the system ends them with the thread that started them.
    """
    ranks_per_host = settings.tensor_parallel // settings.hosts
    first = settings.host_index * ranks_per_host
    values = json.dumps(settings_for_ranks(settings))
    return [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.target.ranks.rank", str(rank), address, values),
            env={**os.environ, **device_environment(settings.device, rank - first)},
        )
        for rank in range(max(1, first), first + ranks_per_host)
    ]


def device_environment(device: str, index: int) -> dict[str, str]:
    """Return the environment in which a process sees only CUDA device `index`; empty on the CPU.

    Raise ValueError if the host has fewer devices.
    """
    if not device.startswith("cuda"):
        return {}
    visible = os.environ.get(_VISIBLE_DEVICES, "")
    devices = visible.split(",") if visible else [str(index)]
    if visible and index >= len(devices):
        raise ValueError(f"{_VISIBLE_DEVICES}: must name a device for each rank of this host, got {visible}")
    return {_VISIBLE_DEVICES: devices[index if visible else 0]}


def main() -> None:
    rank, address = int(sys.argv[1]), sys.argv[2]
    settings = rank_settings(json.loads(sys.argv[3]))
    die_with_parent()
    start_logging("galley-target-rank", settings.log_level, settings.log_format)
    try:
        run_follower(settings, rank, address)
    except GalleyError as error:
        _LOG.error("rank exiting", rank=rank, error=str(error))
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
