"""Load trained drafts into draft replicas, and have the gateways try them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import grpc

from galley.common.draft_loading import draft_version, send_draft
from galley.common.logs import get_logger
from galley.common.registry.leases import DRAFT_POOL, ReplicaRegistry
from galley.common.registry.trials import DraftVersions
from galley.core.errors import UnsupportedModel
from galley.core.routing.choice import DraftLease
from galley.core.routing.loading import replicas_for_load, serving_others
from galley.core.versions.state import NOT_TRIED, VersionState, roll_back

AUTHOR = "learning"
_NO_REPLICA = "no draft replica takes it: it needs two that accept loads (--max-load-mib)"
_FOREIGN = "{} was started or loaded by hand: try or drain it, or name it by --start-version if it is --start"

LONGEST_TRIAL_S = 24 * 3600
"""Time since it began after which the learner ends its own trial, by the clock of the store."""
_LOAD_TIMEOUT_S = 600.0

_log = get_logger(__name__)


class Canaries:
    def __init__(
        self,
        registry: ReplicaRegistry,
        versions: DraftVersions,
        open_channel: Callable[[str], grpc.aio.Channel],
        share: float,
        tokens: int,
    ) -> None:
        """Give a canary `share` of the sessions, until it has given `tokens` tokens."""
        self._registry = registry
        self._versions = versions
        self._open_channel = open_channel
        self._share = share
        self._tokens = tokens

    async def state(self) -> VersionState:
        return await self._versions.read()

    async def give_up(self) -> None:
        """End a trial that the learner began a day ago: so little traffic will not decide it.

        Its sessions are no longer kept, and a new cycle can begin.
        """
        state = await self._versions.read()
        canary = state.split.canary
        if not canary or state.author != AUTHOR:
            return
        if await self._versions.now_ms() - state.since_ms < 1000 * LONGEST_TRIAL_S:
            return
        reason = f"undecided after {LONGEST_TRIAL_S // 3600} hours"
        # By compare-and-set: a trial that has begun meanwhile goes on.
        if await self._versions.change(state.epoch, *roll_back(state, author=AUTHOR, reason=reason)):
            _log.warning("trial given up", version=canary, reason=reason)

    async def problem(self, is_ours: Callable[[str], bool]) -> str:
        """Return why no draft can be offered now, or nothing."""
        state, leases = await self._versions.read(), await self._registry.read(DRAFT_POOL)
        if state.split.canary:
            return f"{state.split.canary} is on trial"
        return _replicas(state, leases, "", is_ours)[1]

    async def offer(self, folder: Path, version: str, reason: str, is_ours: Callable[[str], bool]) -> str:
        """Load a draft into a replica and begin its trial; return why that cannot be, or nothing.

        The version is drained before: without a stable version, all that are not drained get sessions.
        """
        state, leases = await self._versions.read(), await self._registry.read(DRAFT_POOL)
        if state.split.canary:
            return f"{state.split.canary} is on trial"
        if (decision := state.decided.get(version, NOT_TRIED)) != NOT_TRIED:
            # A learner that ended before it recorded its cycle makes the same draft again.
            return f"{version} was decided before: {decision}"
        if all(lease.version != version for lease in leases):
            replicas, problem = _replicas(state, leases, version, is_ours)
            if problem:
                return problem
            await self._versions.drain(version, author=AUTHOR, reason=NOT_TRIED)
            if problem := await self._send(replicas[0], folder, version):
                return problem
        try:
            await self._versions.try_version(
                version, self._share, tokens=self._tokens, author=AUTHOR, reason=reason, digest=version
            )
        except ValueError as error:
            return str(error)
        return ""

    async def restore(
        self,
        folder: Path,
        version: str,
        folder_of: Callable[[str], Path | None],
        is_ours: Callable[[str], bool],
    ) -> None:
        """Load the stable draft into replicas of our other versions; during a trial load only what is lost.

        A version of the trial whose folder is here is loaded again if no replica serves it: one that restarts
        has its first weights.
        """
        state, leases = await self._versions.read(), await self._registry.read(DRAFT_POOL)
        if canary := state.split.canary:
            served = {lease.version for lease in leases}
            lost = [name for name in (canary, version) if name not in served and folder_of(name)]
            replicas, problem = _replicas(state, leases, canary, is_ours)
            for name, lease in zip(lost, replicas, strict=False):
                await self._reload(lease, folder_of(name) or folder, name, state.epoch)
            if lost and not replicas:
                _log.warning("draft of the trial not loaded", version=lost[0], reason=problem)
            return
        ours = [lease for lease in leases if is_ours(lease.version)]
        taking = replicas_for_load(ours, state.split, version)
        if not taking:
            return
        digest = await asyncio.to_thread(draft_version, folder)
        if other := serving_others(leases, version, digest):
            reason = f"{other.address} serves other weights by this version ({other.weights_digest})"
            _log.warning("draft not loaded", folder=str(folder), version=version, reason=reason)
            return
        for lease in taking:
            await self._reload(lease, folder, version, state.epoch)

    async def _reload(self, lease: DraftLease, folder: Path, version: str, epoch: int) -> None:
        """Load a draft, unless the state has changed since `epoch`: the replica's version may be on trial."""
        if (await self._versions.read()).epoch != epoch:
            return
        if problem := await self._send(lease, folder, version):
            _log.warning("draft not loaded", replica=lease.address, version=version, reason=problem)

    async def _send(self, lease: DraftLease, folder: Path, version: str) -> str:
        """Load a draft into a replica that serves what its lease says; return why that failed, or nothing."""
        address = lease.address
        async with self._open_channel(address) as channel:
            try:
                async with asyncio.timeout(_LOAD_TIMEOUT_S):
                    await send_draft(channel, folder, version, lease.version)
            except TimeoutError:
                return f"{address}: no response in {_LOAD_TIMEOUT_S:g} s"
            except UnsupportedModel as error:
                return str(error)
            except grpc.aio.AioRpcError as error:
                return f"{address}: {error.details()}"
        _log.info("draft loaded", replica=address, version=version)
        return ""


def _replicas(
    state: VersionState, leases: Iterable[DraftLease], version: str, is_ours: Callable[[str], bool]
) -> tuple[Sequence[DraftLease], str]:
    """Return the replicas that may take `version`, or why there is none.

    A replica that people started or loaded is left to them until its version is decided.
    """
    leases = list(leases)
    foreign = {
        lease.version
        for lease in leases
        if lease.max_load_bytes
        and lease.version not in {"", state.split.canary}
        and not is_ours(lease.version)
        and state.decided.get(lease.version, NOT_TRIED) == NOT_TRIED
    }
    replicas = replicas_for_load(
        [lease for lease in leases if lease.version not in foreign], state.split, version
    )
    if replicas:
        return replicas, ""
    return [], _FOREIGN.format(min(foreign)) if foreign else _NO_REPLICA
