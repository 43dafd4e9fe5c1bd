"""One rank of a sharded target: its specification, how it loads, and the process of a rank other than 0.

`python -m services.target.ranks.rank ARGUMENTS` runs such a rank; it exits 1 when another rank is lost.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from galley.common.logs import get_logger, start_logging
from galley.common.server.process import die_with_parent, limit_threads
from galley.common.tracing.telemetry import Telemetry, start_telemetry
from galley.core.errors import GalleyError
from services.target.settings import TargetSettings
from services.target.spans import record_rank

if TYPE_CHECKING:
    from galley.engine.model import CausalModel
    from galley.engine.parallel.process_group import ProcessGroup

REDIS_URL = "GALLEY_TARGET_REDIS_URL"
"""Environment variable of the store's URL on Ray, which shows arguments; the URL may hold a password."""
REDIS_URL_FILE = f"{REDIS_URL}_FILE"
"""Environment variable that names a file with it on each node."""

_LOG = get_logger(__name__)
_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class RankSpec:
    """The values that all ranks of a replica share; `model` is a directory, or resolves to one."""

    model: str
    dtype: str
    device: str
    threads: int
    size: int
    invariant: bool = False
    # Longest wait for another rank while they load: hosts read files and compile kernels at their own pace.
    load_timeout_s: float = 600.0
    # Longest wait when they meet, and in a step.
    timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class RankArguments:
    """The arguments of a rank's process; a command line is public, so they hold no secrets."""

    spec: RankSpec
    rank: int
    address: str
    log_level: str
    log_format: Literal["json", "console"]


def spec_of(settings: TargetSettings, size: int) -> RankSpec:
    """Return the specification of a replica of `size` ranks with these settings."""
    return RankSpec(
        settings.model,
        settings.dtype,
        settings.device,
        settings.threads,
        size,
        settings.invariant,
        settings.ranks_timeout_s,
    )


def load_rank(spec: RankSpec, group: ProcessGroup, kv_blocks: int) -> tuple[CausalModel, str]:
    """Load this rank's shard; return it and the fingerprint of the build.

    All ranks call it at once, since loading probes the model. Raises UnsupportedModel, and RankLost if
    another rank does not get as far within `spec.load_timeout_s`.
    """
    # Late, so that --help and Ray's controller need no torch.
    from galley.engine.fingerprint import fingerprint  # noqa: PLC0415
    from galley.engine.serving import load_model  # noqa: PLC0415

    group.wait_at_most(spec.load_timeout_s)
    model = load_model(
        spec.model,
        dtype=spec.dtype,
        device=spec.device,
        threads=spec.threads,
        kv_blocks=kv_blocks,
        ranks=group,
        invariant=spec.invariant,
    )
    build = fingerprint(model)
    group.wait_at_most(spec.timeout_s)
    return model, build


def run_follower(spec: RankSpec, rank: int, address: str) -> None:
    """Meet the others at rank 0's store, load, and run the steps that rank 0 sends until it stops.

    Raises RankLost when another rank is lost, UnsupportedModel where the model cannot be sharded so.
    """
    limit_threads(spec.threads)
    telemetry = start_telemetry("galley-target")
    try:
        _follow(spec, rank, address, telemetry)
    finally:
        telemetry.shutdown()


def _follow(spec: RankSpec, rank: int, address: str, telemetry: Telemetry) -> None:
    from galley.engine.parallel.process_group import Meeting, join  # noqa: PLC0415
    from services.target.ranks.sharded import agree, follow  # noqa: PLC0415

    group = join(
        rank, spec.size, device=spec.device, meeting=Meeting(address=address), timeout_s=spec.timeout_s
    )
    model, _ = load_rank(spec, group, agree(group, rank, 0))
    follow(model, group, partial(record_rank, telemetry.scope(__name__), rank))
    group.close()


async def start_followers(
    settings: TargetSettings, spec: RankSpec, address: str
) -> list[asyncio.subprocess.Process]:
    """Start the processes of this host's ranks, except rank 0, which meet at `address`.

    Call from the main thread: the system ends them with the thread that started them.
    """
    ranks_per_host = spec.size // settings.hosts
    first = settings.host_index * ranks_per_host
    started = []
    for rank in range(max(1, first), first + ranks_per_host):
        arguments = RankArguments(spec, rank, address, settings.log_level, settings.log_format)
        started.append(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "services.target.ranks.rank", json.dumps(asdict(arguments))),
                env={**os.environ, **device_environment(spec, rank - first)},
            )
        )
    return started


def device_environment(spec: RankSpec, index: int) -> dict[str, str]:
    """Return the environment in which a process sees only CUDA device `index` of this host.

    Empty for a rank on the CPU. Raises ValueError if the host has fewer devices.
    """
    if not spec.device.startswith("cuda"):
        return {}
    visible = os.environ.get(_VISIBLE_DEVICES, "")
    devices = visible.split(",") if visible else [str(index)]
    if visible and index >= len(devices):
        raise ValueError(f"{_VISIBLE_DEVICES}: must name a device for each rank of this host, got {visible}")
    return {_VISIBLE_DEVICES: devices[index if visible else 0]}


def main() -> None:
    """Run the rank that the one argument, a RankArguments in JSON, describes."""
    values = json.loads(sys.argv[1])
    arguments = RankArguments(**{**values, "spec": RankSpec(**values["spec"])})
    die_with_parent()
    start_logging("galley-target-rank", arguments.log_level, arguments.log_format)
    try:
        run_follower(arguments.spec, arguments.rank, arguments.address)
    except GalleyError as error:
        _LOG.error("rank exiting", rank=arguments.rank, error=str(error))
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
