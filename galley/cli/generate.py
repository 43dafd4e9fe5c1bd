"""`galley generate`: stream the answer to one prompt."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from galley.cli.flags import AsJson, Connection, Origins, with_answer_flags, with_connection_flags
from galley.client.options import GenerateOptions, Message, Prompt


@with_answer_flags
@with_connection_flags
def generate(
    *,
    prompt: Annotated[str, typer.Argument(help="The prompt. -: read it from standard input.")],
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

    text = _standard_input() if prompt == "-" else prompt
    whole: Prompt = [Message("user", text)] if chat else text
    view = view_of(as_json=as_json, origins=origins, logprobs=options.get("logprobs") is not None)
    show_stream(connection, lambda client: client.generate(whole, **options), view, summary=not as_json)


def _standard_input() -> str:
    content = sys.stdin.buffer.read()
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        problem = f"must be UTF-8 text, got the byte 0x{content[error.start]:02x} at offset {error.start}"
        raise typer.BadParameter(problem, param_hint="standard input") from None
