"""`galley chat`: a conversation with the model."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import Annotated

import typer

from galley.cli.errors import say
from galley.cli.flags import Connection, Origins, with_answer_flags, with_connection_flags
from galley.client.options import GenerateOptions, Message

_HELP = "/quit ends, /reset forgets the conversation, Ctrl-C stops an answer."


@with_answer_flags
@with_connection_flags
def chat(
    *,
    options: GenerateOptions,
    connection: Connection,
    system: Annotated[str, typer.Option(help="A system message to begin with. Default: none.")] = "",
    origins: Origins = False,
) -> None:
    """Talk with the model, one turn after the other."""
    from galley.cli.answer import show_stream, view_of  # noqa: PLC0415  # grpc is slow to load

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401, PLC0415  # history and line editing for input()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    say(_HELP)
    first = [Message("system", system)] if system else []
    history = list(first)
    while (line := _read_line()) is not None:
        if line == "/reset":
            history = list(first)
        elif "\N{REPLACEMENT CHARACTER}" in line:
            say("error: standard input: must be UTF-8 text", style="red")
        elif line:
            turns = [*history, Message("user", line)]
            view = view_of(as_json=False, origins=origins, logprobs=options.get("logprobs") is not None)
            with contextlib.suppress(typer.Exit):
                text = show_stream(
                    connection,
                    lambda client: client.generate(turns, **options),  # noqa: B023  # called at once
                    view,
                    summary=False,
                )
                history = [*turns, Message("assistant", text)]


def _read_line() -> str | None:
    try:
        line = input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
    return None if line == "/quit" else line
