"""One rank of a sharded target: what all are told, how each is loaded, and a follower's whole life."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from galley.common.server.process import limit_threads
from galley.common.tracing.telemetry import Telemetry, start_telemetry
from services.target.settings import TargetSettings
from services.target.spans import tell_rank

if TYPE_CHECKING:
    from galley.engine.model import CausalModel
    from galley.engine.parallel.process_group import ProcessGroup

REDIS_URL = "GALLEY_TARGET_REDIS_URL"
"""Replicas on Ray get it by environment, as it may hold a password: Ray keeps arguments, and shows them."""
REDIS_URL_FILE = f"{REDIS_URL}_FILE"
"""Where each node has it in a file."""


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What every rank of a replica must be told alike; `model` is a directory, or what resolves to one."""

    model: str
    dtype: str
    device: str
    threads: int
    size: int
    invariant: bool = False
    # How long one rank waits for another while they load: files are read, and loops compiled, in each host's
    # own time. And how long when they meet, and in a pass.
    load_timeout_s: float = 600.0
    timeout_s: float = 30.0


def spec_of(settings: TargetSettings, size: int) -> RankSpec:
    """What all ranks of a replica of these settings are told."""
    return RankSpec(
        settings.model,
        settings.dtype,
        settings.device,
        settings.threads,
        size,
        settings.invariant,
        settings.ranks_timeout_s,
    )


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """One rank's shard, ready to run, and the name of the build, which all ranks compute together."""

    model: CausalModel
    fingerprint: str


def load_rank(spec: RankSpec, group: ProcessGroup, kv_blocks: int) -> LoadedRank:
    """Load this rank's shard; all ranks at once, as loading probes the model.

    Raises UnsupportedModel, and RankLost if another does not get as far within `spec.load_timeout_s`.
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
    loaded = LoadedRank(model, fingerprint(model))
    group.wait_at_most(spec.timeout_s)
    return loaded


def run_follower(spec: RankSpec, rank: int, address: str) -> None:
    """Meet the others at rank 0's store, load, and run what rank 0 says until it says stop.

    Raises RankLost when another rank has gone, UnsupportedModel where the model cannot be shared so.
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
    loaded = load_rank(spec, group, agree(group, rank, 0))
    follow(loaded.model, group, partial(tell_rank, telemetry.scope(__name__), rank))
    group.close()
