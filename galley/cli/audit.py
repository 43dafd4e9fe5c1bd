"""`galley audit`: have a target compute the answer of a finished session again, and print a verdict."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.table import Table

from galley.cli.flags import (
    FAILED,
    INTERRUPTED,
    PATIENCE_S,
    Connection,
    Endpoint,
    StackName,
    connect,
    fail_call,
    table_console,
    with_tls_flags,
)
from galley.client.options import Tls
from galley.common.printable import one_line
from galley.core.audit import AuditCounts, AuditReport, Difference, Verdict

if TYPE_CHECKING:
    from galley.client.client import AsyncClient

_T = TypeVar("_T")
_STYLES = {Verdict.SAME: "green", Verdict.NOT_COMPARED: "yellow"}


@with_tls_flags
def audit(
    session_id: Annotated[
        str,
        typer.Argument(
            metavar="[SESSION_ID]",
            help="The session id that `galley generate` printed. Default: print the deployment's totals.",
            show_default=False,
        ),
    ] = "",
    *,
    tls: Tls | None,
    endpoint: Endpoint = None,
    stack: StackName = None,
    timeout: Annotated[
        float | None, typer.Option(min=0.001, help="Deadline of the audit, in seconds. Default: none.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Have a target compute the answer of a finished session again, and compare it with the token log.

    Exits 0 if all compared tokens are the same, 1 otherwise.
    """
    connection = connect(endpoint, stack, PATIENCE_S, tls)
    if not session_id:
        counts = _run(connection, lambda client: client.audit_counts(timeout_s=timeout))
        typer.echo(json.dumps(asdict(counts)) if as_json else "\n".join(_totals(counts)))
        return
    report = _run(connection, lambda client: client.audit(session_id, timeout_s=timeout))
    if as_json:
        typer.echo(json.dumps(asdict(report) | {"verdict": report.verdict.value}))
    else:
        _print(report)
    if report.verdict is not Verdict.SAME:
        raise typer.Exit(FAILED)


def _run(connection: Connection, call: Callable[[AsyncClient], Awaitable[_T]]) -> _T:
    """Return what the gateway responds. Raises typer.Exit."""
    from galley.cli.answer import client_of  # noqa: PLC0415  # grpc is slow to load
    from galley.client.errors import BadKey, GalleyRpcError  # noqa: PLC0415

    async def respond() -> _T:
        async with client_of(connection) as client:
            return await call(client)

    try:
        return asyncio.run(respond())
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except (BadKey, GalleyRpcError) as error:
        raise fail_call(error) from None


def _totals(counts: AuditCounts) -> Iterator[str]:
    if not counts.sessions:
        yield "no session was audited yet"
        return
    yield f"audited sessions: {counts.sessions:,}, damaged in the store: {counts.damaged:,}"
    yield f"deterministic builds: {counts.differing:,} of {counts.tokens:,} tokens differ"
    if counts.loose_tokens:
        yield f"other builds: {counts.loose_differing:,} of {counts.loose_tokens:,} tokens differ"


def _print(report: AuditReport) -> None:
    console = table_console()
    console.print(_verdict(report), style=_STYLES.get(report.verdict, "red"), soft_wrap=True, markup=False)
    if report.differences:
        console.print(_table(report.differences))
    if unnamed := report.differing - len(report.differences):
        console.print(f"and {unnamed:,} more", soft_wrap=True)
    if report.fingerprint:
        console.print(_build(report), soft_wrap=True, markup=False)


def _verdict(report: AuditReport) -> str:
    left = report.output_tokens - report.compared
    why = "of other builds, or the target failed"
    others = f"; the other {left:,} were not compared ({why})" if left else ""
    again = f"a target computed {report.compared:,} of {report.output_tokens:,} output tokens again"
    match report.verdict:
        case Verdict.SAME:
            return f"same: {again}, and each is that of the token log{others}"
        case Verdict.DIFFERS:
            return f"differs: {again}, and {report.differing:,} are not those of the token log{others}"
        case Verdict.DAMAGED:
            return "damaged: the stored session does not agree with its hash; it was changed in the store"
        case Verdict.NOT_COMPARED:
            return "not compared: no target is up that has the build of the answer"


def _table(differences: tuple[Difference, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("index", "logged token", "logprob", "computed token", "logprob"):
        table.add_column(heading, justify="right")
    for one in differences:
        table.add_row(
            str(one.index),
            str(one.logged),
            _logprob(one.logged_logprob),
            str(one.computed),
            _logprob(one.computed_logprob),
        )
    return table


def _logprob(logprob: float | None) -> str:
    return "unknown" if logprob is None else f"{logprob:.4f}"


def _build(report: AuditReport) -> str:
    build = f"build {one_line(report.fingerprint)}, "
    if report.deterministic:
        incident = ": each difference is an incident (docs/runbooks/GalleyAuditDiffers.md)"
        return f"{build}deterministic{incident if report.differing else ''}"
    expected = ": its tokens may depend on the batch, so a difference at a near tie is no fault"
    return f"{build}not deterministic{expected if report.differing else ''}"
