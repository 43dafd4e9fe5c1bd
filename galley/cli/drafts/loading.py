"""`galley drafts load`: put other weights into running draft replicas."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from galley.cli.drafts.flags import Deployment
from galley.cli.flags import say
from galley.common.printable import one_line, printable
from galley.core.versions.state import NOT_TRIED, check_version

if TYPE_CHECKING:
    from galley.common.tls.channels import ChannelTls


async def load(
    deployment: Deployment,
    directory: Path,
    *,
    version: str,
    replicas: list[str],
    tls: ChannelTls | None,
    timeout_s: float,
    author: str,
) -> bool:
    """Load the draft in `directory` into each of the replicas, one after another; empty: into those that fit.

    Return True if all took it. Raise ValueError if there is none, and GalleyError for a bad directory.
    """
    from galley.common.draft_loading import draft_version  # noqa: PLC0415
    from galley.common.registry.leases import DRAFT_POOL  # noqa: PLC0415
    from galley.core.routing.loading import is_in_use, replicas_for_load  # noqa: PLC0415

    digest = await asyncio.to_thread(draft_version, directory)
    name = check_version(version) if version else digest
    state, leases = await deployment.versions.read(), await deployment.registry.read(DRAFT_POOL)
    if not replicas and not leases:
        raise ValueError(
            f"no draft is registered in the pool {deployment.pool}; drafts of `galley up` register with "
            "--drafts 2 --max-load-mib 64; or name replicas with --replica"
        )
    if not replicas:
        replicas = [lease.address for lease in replicas_for_load(leases, state.split, name)]
    if not replicas:
        raise ValueError(
            f"no replica of the pool {deployment.pool} can take {name}: it must be registered, accept loads "
            "(--max-load-mib), serve another version, and be neither of the version on trial nor the only "
            "one of the stable version; name replicas with --replica"
        )
    # Without a stable version all are that are not drained: the replica would get sessions at once.
    if name not in state.split.drained and not is_in_use(leases, state.split, name):
        await deployment.versions.drain(name, author=author, reason=NOT_TRIED)
    loaded = [await _load_one(each, directory, name, tls, timeout_s) for each in replicas]
    return all(loaded)


async def _load_one(
    address: str, directory: Path, version: str, tls: ChannelTls | None, timeout_s: float
) -> bool:
    """Load into one replica, and report it. Return False if it refused or did not answer in time."""
    import grpc.aio  # noqa: PLC0415  # slow to load

    from galley.common.draft_loading import send_draft  # noqa: PLC0415
    from galley.common.tls.channels import open_channel  # noqa: PLC0415

    try:
        async with asyncio.timeout(timeout_s), open_channel(address, tls) as channel:
            served = await send_draft(channel, directory, version)
    except TimeoutError:
        say(f"error: {address}: did not load it within {timeout_s:g} s", style="red")
        return False
    except grpc.aio.AioRpcError as error:
        say(f"error: {address}: {error.details() or error.code().name}", style="red")
        return False
    typer.echo(f"{printable(address)} serves {one_line(served)}")
    return True
