"""`galley top`: what the services do now, from their metrics."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from socket import AF_INET, AF_INET6, SOCK_STREAM, getaddrinfo
from typing import Annotated

import typer
from rich.console import Console

from galley.cli.flags import Output, StackName, choose_stack, fail, not_secret, unless_stack, usage_of
from galley.cli.up import run_stack
from galley.common.sockets import host_and_port
from galley.stack.endpoint import Service

_MIN_S, _DEFAULT_S, _MAX_S = 0.2, 2.0, 60.0
_MAX_SERVICES = 64


def top(
    *,
    metrics: Annotated[
        str | None,
        typer.Option(
            help="Metrics addresses of services (--metrics-port), with commas; a name that has several "
            "addresses, such as a headless Service's, stands for all. Default: those of the stack that "
            "`galley up` runs on this machine, or none with --redis-url.",
            metavar="HOST:PORT,...",
        ),
    ] = None,
    redis_url: Annotated[
        str | None,
        typer.Option(
            envvar="GALLEY_TOP_REDIS_URL",
            callback=not_secret,
            help="URL of the session store, to show the replicas that are registered there. "
            "Default: the embedded store of that stack, or none with --metrics.",
        ),
    ] = None,
    pool: Annotated[
        str, typer.Option(help="Name of the pool in that store, as the services' --pool.")
    ] = "default",
    stack: StackName = None,
    interval: Annotated[
        float, typer.Option(min=_MIN_S, max=_MAX_S, help="Time between refreshes, in seconds.")
    ] = _DEFAULT_S,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
) -> None:
    """Show live what pools, replicas, sessions and speculation do; q or Ctrl-C ends it."""
    services: tuple[Service, ...] = ()
    store = unless_stack("redis_url", redis_url) or ""
    metrics = unless_stack("metrics", metrics)
    if metrics is not None:
        with usage_of("--metrics"):
            services = named_by_address(metrics)
            if len(services) > _MAX_SERVICES:
                raise ValueError(f"must name at most {_MAX_SERVICES} services, got {len(services)}")
    elif not store:
        running = choose_stack(stack)
        services, store = running.services, running.store
        if not services:
            raise fail(f"the stack {running.name!r} serves no metrics; name services with --metrics")
    if store:
        check_store(store, pool)
    run_stack(_show(services, (store, pool), interval, Output(highlight=False), once=once))


def named_by_address(addresses: str) -> tuple[Service, ...]:
    """Return services at comma-separated addresses. Raises ValueError for a bad address or none."""
    unique = dict.fromkeys(address.strip() for address in addresses.split(",") if address.strip())
    each = [one for address in unique for one in _each(address, *host_and_port(address))]
    if not each:
        raise ValueError("must name at least one address")
    return tuple(Service(one, one) for one in dict.fromkeys(each))


def _each(address: str, host: str, port: int) -> list[str]:
    """Return the addresses that a name has in one family; the name itself if it has just one, or none yet."""
    try:
        found = {family: set[str]() for family in (AF_INET, AF_INET6)}
        for family, *_, place in getaddrinfo(host, port, type=SOCK_STREAM):
            found[family].add(str(place[0]))
    except OSError:
        return [address]
    hosts = found[AF_INET] or {f"[{one}]" for one in found[AF_INET6]}
    return [address] if len(hosts) == 1 else [f"{one}:{port}" for one in sorted(hosts)]


async def _show(
    services: tuple[Service, ...],
    store: tuple[str, str],
    interval_s: float,
    console: Console,
    *,
    once: bool,
) -> None:
    """Show them until the end; `store` is its URL, maybe empty, and the name of the pool."""
    from galley.top import live  # noqa: PLC0415  # after the flags are checked

    async with AsyncExitStack() as held:
        read_registry = None
        url, pool = store
        if url:
            from galley.common.registry.leases import ReplicaRegistry  # noqa: PLC0415  # needs redis
            from galley.common.registry.trials import DraftVersions  # noqa: PLC0415
            from galley.top.registry import read_leases  # noqa: PLC0415
            from galley.top.scrape import TIMEOUT_S  # noqa: PLC0415

            registry = ReplicaRegistry(url, pool, call_timeout_s=TIMEOUT_S)
            held.push_async_callback(registry.close)
            versions = DraftVersions(url, pool, call_timeout_s=TIMEOUT_S)
            held.push_async_callback(versions.close)
            read_registry = partial(read_leases, registry, versions)
        scraper = live.Scraper(services, interval_s, read_registry)
        if once:
            if not await live.once(scraper, console):
                raise fail("no service answers")
        elif console.is_terminal and not console.is_dumb_terminal:
            await live.live(scraper, console)
        else:
            await live.lines(scraper, console)


def check_store(redis_url: str, pool: str) -> None:
    """Log only critical events from now on. Raise BadParameter for a URL or pool that cannot be used."""
    try:
        from pydantic import SecretStr  # noqa: PLC0415  # an extra

        from galley.common.redis.connections import refuse_bad_files  # noqa: PLC0415
        from galley.common.registry.leases import check_pool_name  # noqa: PLC0415
    except ImportError as error:
        raise fail("reading the session store needs more packages: pip install 'galley[gateway]'") from error
    with usage_of("--redis-url"):
        refuse_bad_files(SecretStr(redis_url))
    with usage_of("--pool"):
        check_pool_name(pool)
    from galley.common.logs import start_logging  # noqa: PLC0415

    # Log lines about an unreachable store would come between the frames.
    start_logging("galley-top", "critical", "console")
