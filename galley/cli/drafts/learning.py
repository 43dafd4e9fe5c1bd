"""`galley distill --follow`: train the drafts of a deployment further, from its own traffic."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from galley.cli.drafts.flags import channel_tls, peer_tls_options, store_options
from galley.cli.flags import INTERRUPTED, StackName, fail, is_default, not_secret, with_flags_of
from galley.client.options import Tls
from galley.core.versions.rule import DEFAULT_TRIAL_TOKENS
from galley.core.versions.split import MAX_SHARE

if TYPE_CHECKING:
    from galley.distill.follow.options import FollowOptions
    from galley.distill.follow.run import Follower, Replayed

_follow = functools.partial(typer.Option, rich_help_panel="Learning from the traffic")
_SHARED = ("corpus", "batch", "rate", "dtype", "threads", "seed")
"""Flags of `galley distill` that mean the same with --follow, and have other defaults."""
_OWN = {"out", "target", "start", "config", *_SHARED}


@dataclass(frozen=True, slots=True)
class Learning:
    """The flags that belong to --follow; `given` are those of FollowOptions."""

    cycles: int
    replay: int
    redis_url: str | None
    pool: str
    stack: str | None
    tls: Tls | None
    given: dict[str, Any]


def learning_options(  # noqa: PLR0913  # one parameter a flag
    *,
    tls: Tls | None,
    follow: Annotated[
        bool,
        _follow(
            "--follow",
            help="Train on the sessions that gateways keep (--learn-tokens), in cycles, and have gateways "
            "try the drafts that are better. OUT is then the directory of drafts and of the record, and "
            "--start the draft that the replicas began with (docs/operate/learning.md).",
        ),
    ] = False,
    start_version: Annotated[
        str,
        _follow(help="Version under which replicas serve the draft in --start. Default: its digest."),
    ] = "",
    cycle_tokens: Annotated[
        int, _follow(min=1, help="Number of answer tokens that a cycle trains on.")
    ] = 100_000,
    new_tokens: Annotated[
        int, _follow(min=1, help="Number of new answer tokens that a cycle waits for.")
    ] = 10_000,
    every: Annotated[
        float, _follow(min=0, max=86_400, help="Time between the ends and begins of cycles, in seconds.")
    ] = 60.0,
    cycles: Annotated[
        int, _follow(min=0, help="Number of cycles, those with nothing to do included. 0: no end.")
    ] = 0,
    share: Annotated[
        float, _follow(help=f"Share of the sessions that a new draft is tried on, in (0, {MAX_SHARE}].")
    ] = 0.1,
    trial_tokens: Annotated[
        int, _follow(min=1, help="Output tokens of a new draft before it can be promoted.")
    ] = DEFAULT_TRIAL_TOKENS,
    replay: Annotated[
        int,
        _follow(
            min=0,
            metavar="CYCLE",
            help="Repeat the training of a recorded cycle, and compare the drafts. 0: none.",
        ),
    ] = 0,
    redis_url: Annotated[
        str | None,
        _follow(
            envvar=["GALLEY_LEARNING_REDIS_URL", "GALLEY_GATEWAY_REDIS_URL"],
            callback=not_secret,
            help="URL of the session store. Default: the embedded store of the stack that `galley up` runs "
            "on this machine.",
        ),
    ] = None,
    pool: Annotated[
        str,
        _follow(
            envvar=["GALLEY_LEARNING_POOL", "GALLEY_GATEWAY_POOL"],
            help="Name of the pool in that store, as the services' --pool.",
        ),
    ] = "default",
    stack: StackName = None,
) -> Learning | None:
    """Return the flags, or None without --follow and --replay."""
    if not (follow or replay):
        return None
    given = {
        "start_version": start_version,
        "cycle_tokens": cycle_tokens,
        "new_tokens": new_tokens,
        "every_s": every,
        "share": share,
        "trial_tokens": trial_tokens,
    }
    return Learning(cycles, replay, redis_url, pool, stack, tls, given)


with_learning_flags = functools.partial(
    with_flags_of, with_flags_of(peer_tls_options, "tls", learning_options), "learning"
)


def learn(learning: Learning, context: typer.Context, flags: dict[str, Any]) -> None:
    """Follow the traffic until a signal ends it, or replay a cycle. `flags` are those of `galley distill`."""
    from galley.core.errors import GalleyError, InvalidField  # noqa: PLC0415

    try:
        options = _options(learning, context, flags)
        store = store_options(redis_url=learning.redis_url, pool=learning.pool, stack=learning.stack)
        # Not critical only, as `store_options` leaves it: this command runs unattended.
        from galley.common.logs import start_logging  # noqa: PLC0415  # an extra

        start_logging("galley-learning", "info", "console" if sys.stderr.isatty() else "json")
        replayed = asyncio.run(_run(learning, options, store.url, store.pool))
    except InvalidField as fault:
        hint = "OUT" if fault.field in {"out", "work"} else "--" + fault.field.replace("_", "-")
        raise typer.BadParameter(fault.problem, param_hint=hint) from fault
    except (GalleyError, OSError) as error:
        raise fail(error) from error
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    if replayed is not None:
        is_same = replayed.version == replayed.recorded
        typer.echo(
            f"cycle {replayed.cycle}: {'the same draft' if is_same else 'another draft'}, {replayed.version}"
            + ("" if is_same else f"; it was {replayed.recorded}")
        )
        if not is_same:
            raise typer.Exit(1)


def _options(learning: Learning, context: typer.Context, flags: dict[str, Any]) -> FollowOptions:
    """Return the options. Raise BadParameter for a flag of `galley distill` that has no meaning here."""
    from galley.common.models.files import shipped_draft  # noqa: PLC0415
    from galley.core.errors import InvalidField  # noqa: PLC0415
    from galley.distill.follow.options import FollowOptions  # noqa: PLC0415
    from galley.engine.load.resolve import resolve_model  # noqa: PLC0415

    set_here = {name for name in flags if not is_default(context, name)}
    if unused := sorted(set_here - _OWN):
        hint = "--" + unused[0].replace("_", "-")
        raise typer.BadParameter("must not be set with --follow", param_hint=hint)
    # A directory of the default model is called as it, as in the target's image.
    called = Path(flags["target"]).resolve().name
    start: Path | None = flags["start"] or shipped_draft(flags["target"]) or shipped_draft(called)
    if start is None:
        raise InvalidField("start", f"required with --follow: no draft is shipped for {flags['target']}")
    shared = {name: flags[name] for name in _SHARED if name in set_here}
    shared |= {"corpus": tuple(flags["corpus"] or ())}
    options = FollowOptions(
        work=flags["out"],
        target=resolve_model(flags["target"]),
        start=start,
        **shared,
        **learning.given,
    )
    options.check()
    return options


async def _run(learning: Learning, options: FollowOptions, url: str, pool: str) -> Replayed | None:
    async with contextlib.AsyncExitStack() as held:
        follower = await _follower(learning, options, url, pool, held)
        # Without them, a Ctrl-C would wait for the end of the training, which has a thread of its own.
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        if learning.replay:
            return await _replay(follower, learning.replay, stop)
        await follower.run(stop, learning.cycles)
        return None


async def _replay(follower: Follower, cycle: int, stop: asyncio.Event) -> Replayed:
    """Return the replay of a cycle. Raise typer.Exit if a signal ends it."""
    from galley.distill.follow.run import Stopped  # noqa: PLC0415  # imports torch

    try:
        return await follower.replay(cycle, stop)
    except Stopped:
        raise typer.Exit(INTERRUPTED) from None


async def _follower(
    learning: Learning, options: FollowOptions, url: str, pool: str, held: contextlib.AsyncExitStack
) -> Follower:
    from galley.common.registry.leases import ReplicaRegistry  # noqa: PLC0415
    from galley.common.registry.spool import LearningSpool  # noqa: PLC0415
    from galley.common.registry.trials import DraftVersions  # noqa: PLC0415
    from galley.common.tls.channels import open_channel  # noqa: PLC0415
    from galley.distill.follow.canaries import Canaries  # noqa: PLC0415
    from galley.distill.follow.cycle import Learner  # noqa: PLC0415  # imports torch
    from galley.distill.follow.journal import Journal, locked  # noqa: PLC0415
    from galley.distill.follow.run import Follower  # noqa: PLC0415

    if not learning.replay:  # which changes nothing there
        held.enter_context(locked(options.work))
    journal = Journal(options.work)
    learner = await asyncio.to_thread(Learner, options)
    registry, versions = ReplicaRegistry(url, pool), DraftVersions(url, pool)
    spool = LearningSpool(url, pool)
    for closing in (registry, versions, spool):
        held.push_async_callback(closing.close)
    tls = channel_tls(learning.tls)
    canaries = Canaries(
        registry,
        versions,
        lambda address: open_channel(address, tls),
        options.share,
        options.trial_tokens,
    )
    return Follower(options, learner, journal, spool, canaries)
