"""`galley trace`: where the time of a request went, from a file of traces or a back end."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path  # Typer reads the annotation
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from galley.cli.flags import fail, refuse_typed, usage_of
from galley.trace.read.backend import Backend, backend_of
from galley.trace.read.build import stories_of
from galley.trace.read.library import WHEN, NotFound, Selection, find, index_of
from galley.trace.read.model import Story
from galley.trace.read.otlp_file import BadTraceFile, Lines, newest_file, trace_dir
from galley.trace.show.html import page
from galley.trace.show.summary import count
from galley.trace.show.waterfall import list_lines, plain_lines, show

_LATEST = 20
_MAX_STORIES = 20


def trace(  # noqa: PLR0913  # one parameter a flag
    request_id: Annotated[
        str, typer.Argument(metavar="[SESSION_ID|TRACE_ID]", help="The id, or a prefix that only one has.")
    ] = "",
    *,
    file: Annotated[
        Path | None,
        typer.Option(
            help="File of OTLP traces in JSON lines. Default: the newest of `galley up --trace`.",
            dir_okay=False,
        ),
    ] = None,
    source: Annotated[
        str,
        typer.Option(
            "--from",
            envvar="GALLEY_TRACE_FROM",
            metavar="URL",
            help="Back end to fetch from: tempo://HOST:PORT, jaeger://HOST:PORT, or the address of OTLP JSON "
            "(http:// or https://). Default: none.",
        ),
    ] = "",
    html: Annotated[
        Path | None, typer.Option(help="HTML file to write instead. Default: none.", dir_okay=False)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show all rounds of long sessions.")] = False,
    last: Annotated[bool, typer.Option("--last", help="Show the latest request.")] = False,
    slowest: Annotated[
        bool, typer.Option("--slowest", help="Show the request with the slowest round.")
    ] = False,
    latest: Annotated[bool, typer.Option("--list", help="List the latest requests instead.")] = False,
) -> None:
    """Show where the time of a session went, round by round, and why its slowest round was slow."""
    if [bool(request_id), last, slowest, latest].count(True) != 1:
        problem = "must be a session or trace id, or one of --last, --slowest and --list"
        raise typer.BadParameter(problem, param_hint="SESSION_ID")
    if latest and html is not None:
        raise typer.BadParameter("must not come with --list", param_hint="--html")
    console = Console(highlight=False)
    if source and file is not None:
        refuse_typed(("source",), "must not come with --file")
        source = ""  # of the environment
    with usage_of("--from"):
        backend = backend_of(source) if source else None
    try:
        if backend is not None:
            lines: Lines = backend.one(request_id) if request_id else backend.latest()
        else:
            lines = Lines(file or _newest())
        if latest:
            _list(lines, console)
        else:
            found = find(lines, request_id) if request_id else _choose(lines, backend, slowest=slowest)
            _show(found, console, html, everything=everything)
    except (BadTraceFile, NotFound, OSError) as error:
        raise fail(error) from None


def _newest() -> Path:
    path = newest_file(trace_dir())
    if path is None:
        raise BadTraceFile(
            f"{trace_dir()}: holds no traces; start a stack with `galley up --trace`, or name a --file"
        )
    return path


def _choose(lines: Lines, backend: Backend | None, *, slowest: bool) -> Selection:
    index = index_of(lines)
    entries = index.slowest() if slowest else index.latest(1)
    if not entries:
        raise NotFound(f"{lines.name}: holds no request yet; {WHEN}")
    chosen = entries[0].session_id or entries[0].trace_id
    if backend is None:
        return find(lines, chosen, index)
    return find(backend.one(chosen), chosen)  # with the steps that it shared


def _list(lines: Lines, console: Console) -> None:
    index = index_of(lines)
    for line in list_lines(index.latest(_LATEST)):
        console.print(line, soft_wrap=True)
    console.print(
        Text(f"{count(len(index.entries), 'request')} in {lines.name}", style="dim"), soft_wrap=True
    )


def _show(found: Selection, console: Console, html: Path | None, *, everything: bool) -> None:
    stories = stories_of(found.spans, found.session_id, found.index.sessions_of, cut=found.cut)
    if html is not None:
        _write_private(html, page(_only(stories), everything=everything))
        console.print(Text(f"wrote {html}"), soft_wrap=True)
        return
    for number, story in enumerate(stories[:_MAX_STORIES]):
        if number:
            console.print()
        show(story, console, everything=everything)
    if len(stories) > _MAX_STORIES:
        console.print(f"... {count(len(stories) - _MAX_STORIES, 'more session')} in this trace")
    if not stories:
        console.print(f"this trace has no request of Galley; its {count(len(found.spans), 'span')}:")
        for line in plain_lines(found.spans):
            console.print(line, soft_wrap=True)


def _write_private(path: Path, text: str) -> None:
    # Only the owner may read it, like the traces: it may hold prompts.
    with open(path, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            os.fchmod(file.fileno(), 0o600)  # it may have been there, open to others
        file.write(text)


def _only(stories: Sequence[Story]) -> Story:
    if len(stories) == 1:
        return stories[0]
    if not stories:
        raise NotFound("this trace has no request of Galley, so there is no page to write")
    raise NotFound(f"this trace has {len(stories)} sessions; name one of them")
