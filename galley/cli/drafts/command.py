"""`galley drafts`: list, try, promote, drain and load versions of the draft."""

from __future__ import annotations

import getpass
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from galley.cli.config import with_config_flag
from galley.cli.drafts import report
from galley.cli.drafts.flags import Deployment, Store, channel_tls, run, with_peer_tls_flags, with_store_flags
from galley.cli.flags import FAILED, say, table_console, usage_of
from galley.client.options import Tls
from galley.common.sockets import host_and_port, joined
from galley.core.versions.rule import DEFAULT_TRIAL_TOKENS
from galley.core.versions.split import MAX_SHARE, SplitBy
from galley.core.versions.state import MAX_REASON, check_version

if TYPE_CHECKING:
    from galley.core.routing.choice import DraftLease

_LOAD_TIMEOUT_S = 600.0

drafts = typer.Typer(
    name="drafts",
    no_args_is_help=True,
    help="List and compare, try, promote, drain and load versions of the draft.",
)


def _version(name: str) -> str:
    """Return the name of a version, or "". Raises BadParameter."""
    try:
        return check_version(name) if name else name
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


Version = Annotated[
    str, typer.Argument(callback=_version, help="Name of the version, as `galley drafts list` shows it.")
]


def _reason(text: str) -> str:
    """Return a reason. Raise BadParameter if it is too long: gateways read it each second."""
    if len(text) > MAX_REASON:
        raise typer.BadParameter(f"must be at most {MAX_REASON} characters, got {len(text)}")
    return text


Reason = Annotated[
    str,
    typer.Option(
        callback=_reason, help=f"Text for the history, at most {MAX_REASON} characters. Default: none."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def _list(store: Store, *, as_json: AsJson = False) -> None:
    """Show versions with their replicas, sessions, gain, speed-up and cost; intervals are of 95 %.

    The gain is the share of output tokens that drafts gave.
    """
    found, ongoing = run(store, _read)
    if as_json:
        facts = {"pool": store.pool, "trial": ongoing, "versions": [row.as_json() for row in found]}
        typer.echo(json.dumps(facts))
        return
    console = table_console()
    if not found:
        console.print(
            f"no draft is registered in the pool {store.pool}, and no version was tried; drafts of "
            "`galley up` register with --drafts 2 or --max-load-mib",
            markup=False,
            soft_wrap=True,
        )
        return
    console.print(report.table_of(found))
    if ongoing is not None:
        console.print(report.trial_line(ongoing), soft_wrap=True, markup=False)
    for line in report.replica_lines(found):
        console.print(line, soft_wrap=True, markup=False)
    for line in report.warnings(found):
        say(line)


async def _read(deployment: Deployment) -> tuple[list[report.Row], dict[str, Any] | None]:
    state = await deployment.versions.read()
    counts = await deployment.versions.counts()
    return report.rows(state, counts, await _leases(deployment)), report.trial(state, counts)


async def _leases(deployment: Deployment) -> list[DraftLease]:
    from galley.common.registry.leases import DRAFT_POOL  # noqa: PLC0415  # needs redis

    return await deployment.registry.read(DRAFT_POOL)


def _try(
    store: Store,
    version: Version,
    *,
    share: Annotated[
        float, typer.Option(help=f"Share of the sessions that the version gets, in (0, {MAX_SHARE}].")
    ] = 0.05,
    by: Annotated[SplitBy, typer.Option(help="What is drawn: each session, tenant or workload.")] = "session",
    tokens: Annotated[
        int, typer.Option(min=1, help="Output tokens of the version before it can be promoted.")
    ] = DEFAULT_TRIAL_TOKENS,
    reason: Reason = "",
) -> None:
    """Give a share of the sessions to a version.

    Gateways promote it if it is better, and roll it back if it is worse. By tenant or workload they only roll
    it back.
    """
    with usage_of("--share"):
        if not 0 < share <= MAX_SHARE:
            raise ValueError(f"must be > 0 and <= {MAX_SHARE}, got {share}")

    async def begin(deployment: Deployment) -> int:
        digests = [lease.weights_digest for lease in await _leases(deployment) if lease.version == version]
        digest = digests[0] if len(set(digests)) == 1 else ""
        await deployment.versions.try_version(
            version, share, by=by, tokens=tokens, author=_author(), reason=reason, digest=digest
        )
        return len(digests)

    replicas = run(store, begin)
    typer.echo(f"{version} gets {share:.1%} of the sessions, drawn by {by}")
    if not replicas:
        say(f"warning: no registered draft serves {version}; until one does, others serve its sessions")


def _promote(store: Store, version: Version, *, reason: Reason = "") -> None:
    """Give all sessions to a version, and end the trial in force."""

    async def promote(deployment: Deployment) -> tuple[int, int]:
        leases = await _leases(deployment)
        serving = sum(lease.version == version for lease in leases)
        if not serving:
            raise ValueError(f"no registered draft serves {version}")
        await deployment.versions.promote(version, author=_author(), reason=reason)
        return serving, len(leases)

    serving, replicas = run(store, promote)
    typer.echo(f"{version} gets all sessions")
    if serving < replicas:
        say(
            f"warning: {serving} of {replicas} draft replicas serve it; load it into "
            f"the others with `galley drafts load DIR --version {version}`"
        )


def _drain(store: Store, version: Version, *, reason: Reason = "") -> None:
    """Give no more sessions to a version; a trial of it ends."""

    async def drain(deployment: Deployment) -> bool:
        versions = deployment.versions
        before, leases = await versions.read(), await _leases(deployment)
        await versions.drain(version, author=_author(), reason=reason)
        named = {before.split.stable, before.split.canary, *before.decided}
        return version in named or any(lease.version == version for lease in leases)

    is_known = run(store, drain)
    typer.echo(f"{version} gets no more sessions")
    if not is_known:
        say(f"warning: no registered draft serves {version}, and it was never tried or decided")


def _history(store: Store, *, as_json: AsJson = False) -> None:
    """Print the trials, promotions, roll-backs and drains, the latest first."""
    events = run(store, lambda deployment: deployment.versions.history())
    if as_json:
        typer.echo(json.dumps([report.event_json(event) for event in events]))
        return
    console = table_console()
    for event in events:
        console.print(report.event_line(event), soft_wrap=True, markup=False)
    if not events:
        console.print("nothing has changed yet")


def _load(
    store: Store,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Draft directory, as `galley distill` writes it.")
    ],
    *,
    tls: Tls | None,
    replica: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Replica to load it into; repeatable. Default: the registered ones that accept loads and "
            "get no sessions, else one of several with the stable version; none whose version was loaded "
            "and not tried yet.",
        ),
    ] = None,
    version: Annotated[
        str, typer.Option(callback=_version, help="Name of the version. Default: the digest of the files.")
    ] = "",
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Longest time for one replica, in seconds.")
    ] = _LOAD_TIMEOUT_S,
) -> None:
    """Load a draft into running replicas, without a restart. It gets no sessions until it is tried.

    A replica serves its old weights until the new ones are checked and warm.
    """
    from galley.cli.drafts.loading import load  # noqa: PLC0415

    with usage_of("--replica"):
        replicas = [joined(*host_and_port(each)) for each in replica or ()]
    if not directory.is_dir():
        raise typer.BadParameter(f"must be a directory, got {directory}", param_hint="DIR")
    work = partial(
        load,
        directory=directory,
        version=version,
        replicas=replicas,
        tls=channel_tls(tls),
        timeout_s=timeout,
        author=_author(),
    )
    if not run(store, work):
        raise typer.Exit(FAILED)


def _forget(
    store: Store,
    principal: Annotated[str, typer.Argument(help="Name of the principal; `anonymous` for callers without.")],
) -> None:
    """Delete all that is kept of a principal's sessions for learning."""

    async def forget(_: Deployment) -> int:
        from galley.common.registry.spool import LearningSpool  # noqa: PLC0415  # needs redis

        spool = LearningSpool(store.url, store.pool)
        try:
            return await spool.forget(principal)
        finally:
            await spool.close()

    sessions = run(store, forget)
    typer.echo(f"{sessions} sessions of {principal} deleted")


def _author() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user without a name, as in a container
        return ""


_COMMANDS: dict[str, Callable[..., None]] = {
    "list": _list,
    "try": _try,
    "promote": _promote,
    "drain": _drain,
    "load": with_peer_tls_flags(_load),
    "history": _history,
    "forget": _forget,
}
for _name, _command in _COMMANDS.items():
    drafts.command(_name)(with_config_flag(with_store_flags(_command), "drafts"))
