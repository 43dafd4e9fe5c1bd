"""`galley generate` and `resume`: stream an answer."""

from __future__ import annotations

import sys
from pathlib import Path  # Typer reads the annotation
from typing import Annotated

import typer

from galley.cli.flags import (
    AsJson,
    Connection,
    Origins,
    Timeout,
    with_answer_flags,
    with_connection_flags,
)
from galley.client.options import GenerateOptions, Message, Prompt


@with_answer_flags
@with_connection_flags
def generate(
    *,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt. -: read it from standard input.", show_default=False)
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="File to read the prompt from. Default: none."),
    ] = None,
    options: GenerateOptions,
    connection: Connection,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat/--raw",
            help="--chat sends the prompt as a user's message, --raw as text to complete.",
        ),
    ] = True,
    as_json: AsJson = False,
    origins: Origins = False,
) -> None:
    """Stream the answer to a prompt."""
    from galley.cli.answer import show_stream, view_of  # noqa: PLC0415  # grpc is slow to load

    text = _prompt(prompt, file)
    whole: Prompt = [Message("user", text)] if chat else text
    view = view_of(as_json=as_json, origins=origins, logprobs=options.get("logprobs") is not None)
    show_stream(connection, lambda client: client.stream(whole, **options), view, summary=not as_json)


def _prompt(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        problem = "must be a text, or - for standard input, or be left out with --file"
        raise typer.BadParameter(problem, param_hint="PROMPT")
    if file is not None:
        try:
            return _text(file.read_bytes(), "--file")
        except OSError as error:
            problem = f"{file}: cannot be read: {error.strerror}"
            raise typer.BadParameter(problem, param_hint="--file") from None
    return _text(sys.stdin.buffer.read(), "standard input") if prompt == "-" else str(prompt)


def _text(content: bytes, source: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        problem = f"must be UTF-8 text, got the byte 0x{content[error.start]:02x} at offset {error.start}"
        raise typer.BadParameter(problem, param_hint=source) from None


@with_connection_flags
def resume(
    session_id: Annotated[str, typer.Argument(help="The session id that `galley generate` printed.")],
    *,
    connection: Connection,
    next_index: Annotated[
        int, typer.Option(min=0, help="The first output token to show; 0 shows the whole answer.")
    ] = 0,
    timeout: Timeout = None,
    as_json: AsJson = False,
    origins: Origins = False,
) -> None:
    """Continue an answer that was cut off, at any gateway of the same store."""
    from galley.cli.answer import show_stream, view_of  # noqa: PLC0415  # grpc is slow to load

    show_stream(
        connection,
        lambda client: client.resume(session_id, next_index, timeout_s=timeout),
        view_of(as_json=as_json, origins=origins),
        summary=not as_json,
    )
