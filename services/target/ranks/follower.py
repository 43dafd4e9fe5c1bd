"""A rank other than 0 as a process: `python -m services.target.ranks.follower TOLD`; exits 1 on a loss."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import Literal

from galley.common.logs import get_logger, start_logging
from galley.common.server.process import die_with_parent
from galley.core.errors import GalleyError
from services.target.ranks.rank import RankSpec, run_follower
from services.target.settings import TargetSettings

_LOG = get_logger(__name__)
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Told:
    """What a follower's process is told: nothing that must not be seen on a command line."""

    spec: RankSpec
    rank: int
    address: str
    log_level: str
    log_format: Literal["json", "console"]


async def start_followers(
    settings: TargetSettings, spec: RankSpec, address: str
) -> list[asyncio.subprocess.Process]:
    """The processes of this host's ranks but for rank 0, which meet at `address`; they end with this one.

    Call from the main thread: the system ends them with the thread that started them.
    """
    each = spec.size // settings.hosts
    first = settings.host_index * each
    started = []
    for rank in range(max(1, first), first + each):
        told = Told(spec, rank, address, settings.log_level, settings.log_format)
        started.append(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "services.target.ranks.follower", json.dumps(asdict(told))),
                env={**os.environ, **device_environment(spec, rank - first)},
            )
        )
    return started


def device_environment(spec: RankSpec, place: int) -> dict[str, str]:
    """What leaves the `place`-th CUDA device of this host to a rank's process, as the only one it sees.

    Raises ValueError if the host has fewer.
    """
    if not spec.device.startswith("cuda"):
        return {}
    visible = os.environ.get(_VISIBLE, "")
    devices = visible.split(",") if visible else [str(place)]
    if visible and place >= len(devices):
        raise ValueError(f"{_VISIBLE}: {visible} has no device for each of this host's ranks")
    return {_VISIBLE: devices[place if visible else 0]}


def main() -> None:
    """Run the rank that the one argument tells of."""
    given = json.loads(sys.argv[1])
    told = Told(**{**given, "spec": RankSpec(**given["spec"])})
    die_with_parent()
    start_logging("galley-target-rank", told.log_level, told.log_format)
    try:
        run_follower(told.spec, told.rank, told.address)
    except GalleyError as error:
        _LOG.error("this rank ends", rank=told.rank, problem=str(error))
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
