"""`galley drafts load`: put other weights into running draft replicas."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from galley.cli.drafts.flags import Deployment
from galley.cli.flags import say
from galley.common.printable import one_line, printable
from galley.core.versions.state import NOT_TRIED, VersionState, check_version

if TYPE_CHECKING:
    from galley.common.tls.channels import ChannelTls
    from galley.core.routing.choice import DraftLease


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
    from galley.core.routing.loading import is_in_use, serving_others  # noqa: PLC0415

    digest = await asyncio.to_thread(draft_version, directory)
    name = check_version(version) if version else digest
    state, leases = await deployment.versions.read(), await deployment.registry.read(DRAFT_POOL)
    if other := serving_others(leases, name, digest, replicas):
        raise ValueError(
            f"--version: must be another than {name}, by which {other.address} serves the weights "
            f"{other.weights_digest}; those of {directory} are {digest}"
        )
    if name == state.split.canary and state.digest not in {"", digest}:
        raise ValueError(
            f"--version: must be another than {name}, which is on trial with the weights {state.digest}; "
            f"those of {directory} are {digest}"
        )
    # A replica that a person names takes the draft whatever it serves.
    served = dict.fromkeys(replicas, "") or _fitting(leases, state, name, deployment.pool)
    # Without a stable version all are that are not drained: the replica would get sessions at once.
    if name not in state.split.drained and not is_in_use(leases, state.split, name):
        await deployment.versions.drain(name, author=author, reason=NOT_TRIED)
    loaded = [
        await _load_one(address, directory, name, replaces, tls, timeout_s)
        for address, replaces in served.items()
    ]
    return all(loaded)


def _fitting(leases: list[DraftLease], state: VersionState, version: str, pool: str) -> dict[str, str]:
    """Return the addresses of the replicas that fit, and their versions. Raise ValueError if there is none.

    A replica whose version was loaded and not tried is left to whoever loaded it.
    """
    from galley.core.routing.loading import replicas_for_load  # noqa: PLC0415

    if not leases:
        raise ValueError(
            f"no draft is registered in the pool {pool}; drafts of `galley up` register with "
            "--drafts 2 --max-load-mib 64; or name replicas with --replica"
        )
    untried = {lease.version for lease in leases if state.decided.get(lease.version) == NOT_TRIED}
    others = [lease for lease in leases if lease.version not in untried]
    if found := replicas_for_load(others, state.split, version):
        return {lease.address: lease.version for lease in found}
    if kept := replicas_for_load(leases, state.split, version):
        names = ", ".join(sorted({lease.version for lease in kept}))
        raise ValueError(
            f"{names} was loaded and not tried yet: `galley drafts try` or `drain` it, or name its replica "
            "with --replica"
        )
    raise ValueError(
        f"no replica of the pool {pool} can take {version}: it must be registered, accept loads "
        "(--max-load-mib), serve another version, and be neither of the version on trial nor the only "
        "one of the stable version; name replicas with --replica"
    )


async def _load_one(
    address: str, directory: Path, version: str, replaces: str, tls: ChannelTls | None, timeout_s: float
) -> bool:
    """Load into one replica, and report it. Return False if it refused or did not answer in time."""
    import grpc.aio  # noqa: PLC0415  # slow to load

    from galley.common.draft_loading import send_draft  # noqa: PLC0415
    from galley.common.tls.channels import open_channel  # noqa: PLC0415

    try:
        async with asyncio.timeout(timeout_s), open_channel(address, tls) as channel:
            served = await send_draft(channel, directory, version, replaces)
    except TimeoutError:
        say(f"error: {address}: did not load it within {timeout_s:g} s", style="red")
        return False
    except grpc.aio.AioRpcError as error:
        say(f"error: {address}: {error.details() or error.code().name}", style="red")
        return False
    typer.echo(f"{printable(address)} serves {one_line(served)}")
    return True
