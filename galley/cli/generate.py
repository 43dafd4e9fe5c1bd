"""`galley generate`: stream the answer to one prompt."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from galley.cli.errors import INTERRUPTED, fail
from galley.cli.flags import AsJson, Connection, Origins, with_answer_flags, with_connection_flags
from galley.client.options import GenerateOptions, Message, Prompt

if TYPE_CHECKING:  # grpc is slow to load
    from galley.client.client import AsyncClient, TokenStream


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
    text = _standard_input() if prompt == "-" else prompt
    whole: Prompt = [Message("user", text)] if chat else text
    show_stream(
        connection,
        lambda client: client.generate(whole, **options),
        as_json=as_json,
        origins=origins,
        logprobs=options.get("logprobs") is not None,
    )


def _standard_input() -> str:
    content = sys.stdin.buffer.read()
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        problem = f"must be UTF-8 text, got the byte 0x{content[error.start]:02x} at offset {error.start}"
        raise typer.BadParameter(problem, param_hint="standard input") from None


def show_stream(
    connection: Connection,
    start: Callable[[AsyncClient], TokenStream],
    *,
    as_json: bool,
    origins: bool,
    logprobs: bool = False,
) -> None:
    """Show the stream that `start` opens, then a line about it on standard error."""
    from galley.cli.answer import Answer, view_of  # noqa: PLC0415  # grpc is slow to load
    from galley.client.errors import BadKey, GalleyRpcError  # noqa: PLC0415

    answer = Answer(view_of(as_json=as_json, origins=origins, logprobs=logprobs))
    try:
        asyncio.run(answer.show(connection, start))
    except KeyboardInterrupt:
        answer.say_how_to_resume()
        raise typer.Exit(INTERRUPTED) from None
    except (BadKey, GalleyRpcError) as error:
        answer.say_how_to_resume(error)
        raise fail(error) from None
    if not as_json:
        answer.say_summary()
