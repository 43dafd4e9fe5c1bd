"""Flags that the commands of `galley drafts` share: the store that has the registry, and TLS to replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from galley.cli.flags import (
    INTERRUPTED,
    StackName,
    choose_stack,
    fail,
    not_secret,
    unless_stack,
    with_flags_of,
)
from galley.cli.top import check_store
from galley.client.options import Tls

if TYPE_CHECKING:
    from galley.common.registry.leases import ReplicaRegistry
    from galley.common.registry.trials import DraftVersions
    from galley.common.tls.channels import ChannelTls

_T = TypeVar("_T")
_tls = partial(typer.Option, rich_help_panel="TLS to drafts")


@dataclass(frozen=True, slots=True)
class Store:
    url: str
    pool: str


@dataclass(frozen=True, slots=True)
class Deployment:
    """The registry and the versions of a deployment's drafts."""

    pool: str
    registry: ReplicaRegistry
    versions: DraftVersions


def store_options(
    *,
    redis_url: Annotated[
        str | None,
        typer.Option(
            envvar=["GALLEY_DRAFTS_REDIS_URL", "GALLEY_GATEWAY_REDIS_URL"],
            callback=not_secret,
            help="URL of the session store, in which drafts register. Default: the embedded store of the "
            "stack that `galley up` runs on this machine.",
        ),
    ] = None,
    pool: Annotated[
        str,
        typer.Option(
            envvar=["GALLEY_DRAFTS_POOL", "GALLEY_GATEWAY_POOL"],
            help="Name of the pool in that store, as the services' --pool.",
        ),
    ] = "default",
    stack: StackName = None,
) -> Store:
    url = unless_stack("redis_url", redis_url)
    if not url:
        running = choose_stack(stack)
        url = running.store
        if not url:
            raise fail(f"the stack {running.name!r} has no store of its own; name one with --redis-url")
    check_store(url, pool)
    return Store(url, pool)


def with_store_flags(command: Callable[..., None]) -> Callable[..., None]:
    return with_flags_of(store_options, "store", command)


def peer_tls_options(
    *,
    peer_ca_file: Annotated[
        str,
        _tls(
            envvar="GALLEY_GATEWAY_PEER_CA_FILE",
            help="PEM file of the authorities of drafts. Empty: drafts are called without TLS.",
        ),
    ] = "",
    peer_cert_file: Annotated[
        str,
        _tls(
            envvar="GALLEY_GATEWAY_PEER_CERT_FILE",
            help="PEM file of a gateway's client certificate, for mutual TLS. Default: none.",
        ),
    ] = "",
    peer_key_file: Annotated[
        str, _tls(envvar="GALLEY_GATEWAY_PEER_KEY_FILE", help="PEM file of its key. Default: none.")
    ] = "",
    draft_tls_name: Annotated[
        str,
        _tls(
            envvar="GALLEY_GATEWAY_DRAFT_TLS_NAME",
            help="Name that certificates of drafts must have. Empty: the host of the address.",
        ),
    ] = "",
) -> Tls | None:
    """Return the TLS to drafts, as gateways have it, or None."""
    if not peer_ca_file:
        return None
    tls = Tls(peer_ca_file, peer_cert_file, peer_key_file, draft_tls_name)
    from galley.client.credentials import tls_to_gateways  # noqa: PLC0415  # grpc is slow to load
    from galley.client.errors import BadTlsFile  # noqa: PLC0415

    try:
        tls_to_gateways(tls)
    except BadTlsFile as error:
        flag = "--peer-" + error.setting.replace("_", "-")
        raise typer.BadParameter(error.problem, param_hint=flag) from None
    return tls


def channel_tls(tls: Tls | None) -> ChannelTls | None:
    """Return the TLS of channels to drafts, by the flags of `peer_tls_options`."""
    if tls is None:
        return None
    from galley.client.credentials import tls_to_gateways  # noqa: PLC0415  # grpc is slow to load

    return tls_to_gateways(tls)


def with_peer_tls_flags(command: Callable[..., None]) -> Callable[..., None]:
    return with_flags_of(peer_tls_options, "tls", command)


def run(store: Store, work: Callable[[Deployment], Awaitable[_T]]) -> _T:
    """Return what `work` returns. Raises typer.Exit if it fails, or raises ValueError."""
    from galley.common.registry.leases import ReplicaRegistry  # noqa: PLC0415
    from galley.common.registry.trials import DraftVersions  # noqa: PLC0415
    from galley.core.errors import GalleyError  # noqa: PLC0415

    async def connected() -> _T:
        registry, versions = ReplicaRegistry(store.url, store.pool), DraftVersions(store.url, store.pool)
        try:
            return await work(Deployment(store.pool, registry, versions))
        finally:
            await registry.close()
            await versions.close()

    try:
        return asyncio.run(connected())
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except (GalleyError, ValueError, OSError) as error:
        raise fail(error) from None
