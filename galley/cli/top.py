"""`galley top`: what the services do now, read from their metrics again and again."""

from __future__ import annotations

import io
import sys
from contextlib import AsyncExitStack
from typing import Annotated

import typer
from rich.console import Console

from galley.cli.errors import FAILED, fail
from galley.cli.flags import not_shown
from galley.cli.up import run_stack
from galley.stack.endpoint import Announced, NoEndpoint, find_services
from galley.top.service import named_by_address

_LEAST_S, _S, _MOST_S = 0.2, 2.0, 60.0
_MOST_SERVICES = 64


def top(
    *,
    metrics: Annotated[
        str | None,
        typer.Option(
            help="Services that tell metrics (--metrics-port), with commas. "
            "Default: those of the stack that `galley up` runs on this machine.",
            metavar="HOST:PORT,...",
        ),
    ] = None,
    redis_url: Annotated[
        str | None,
        typer.Option(
            envvar="GALLEY_TOP_REDIS_URL",
            callback=not_shown,
            help="The session store: show the targets and drafts registered there (docs/operate/redis.md).",
        ),
    ] = None,
    interval: Annotated[
        float, typer.Option(min=_LEAST_S, max=_MOST_S, help="Seconds from one look to the next.")
    ] = _S,
    once: Annotated[bool, typer.Option("--once", help="Look twice, print one frame and end.")] = False,
) -> None:
    """Show live what pools, replicas, sessions and speculation do; q or Ctrl-C ends it."""
    found = _found(metrics, redis_url)
    if found.store:
        _check(found.store)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a bar that cannot be written is no reason to end
    run_stack(_show(found, interval, Console(highlight=False), once=once))


async def _show(found: Announced, interval_s: float, console: Console, *, once: bool) -> None:
    from galley.top import live  # noqa: PLC0415  # after the flags are known to be right

    async with AsyncExitStack() as held:
        ask = None
        if found.store:
            from galley.top.registry import Leases  # noqa: PLC0415  # needs redis

            leases = Leases(found.store)
            held.push_async_callback(leases.close)
            ask = leases.read
        watched = live.Sources(found.services, interval_s, ask)
        if once:
            if not await live.once(watched, console):
                raise fail("nobody answers", FAILED)
        elif console.is_terminal and not console.is_dumb_terminal:
            await live.live(watched, console)
        else:
            await live.lines(watched, console)


def _found(metrics: str | None, redis_url: str | None) -> Announced:
    """What is named; where nothing is, what the stack that runs here has announced."""
    try:
        if metrics is None and not redis_url:
            return find_services()
        services = () if metrics is None else named_by_address(metrics)
    except NoEndpoint as error:
        raise fail(error) from None
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--metrics") from error
    if len(services) > _MOST_SERVICES:
        raise typer.BadParameter(f"at most {_MOST_SERVICES}, are {len(services)}", param_hint="--metrics")
    return Announced(services, redis_url or "")


def _check(redis_url: str) -> None:
    """Refuse what cannot be asked."""
    try:
        from galley.common.redis.connections import Connections  # noqa: PLC0415  # comes with the extras
        from galley.common.redis.url import parse_redis_url  # noqa: PLC0415
    except ImportError as error:
        raise fail("--redis-url needs redis: pip install 'galley[gateway]'") from error
    try:
        Connections(parse_redis_url(redis_url))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--redis-url") from error
    from galley.common.logs import start_logging  # noqa: PLC0415

    # What is logged of a store that is away would come between the frames.
    start_logging("galley-top", "critical", "console")
