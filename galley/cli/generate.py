"""`galley generate` and `resume`: stream an answer."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path  # Typer reads the annotation
from typing import Annotated

import typer

from galley.cli.flags import (
    AsJson,
    Connection,
    Origins,
    Timeout,
    fail,
    with_answer_flags,
    with_connection_flags,
    with_flags_of,
)
from galley.client.options import GenerateOptions, Message, Prompt
from galley.client.structured import parser_of

_form = functools.partial(typer.Option, rich_help_panel="Form of the answer")


@with_answer_flags
def form_options(
    *,
    options: GenerateOptions,
    schema: Annotated[
        Path | None, _form(help="File of a JSON schema; the answer is JSON that it describes. Default: none.")
    ] = None,
    regex: Annotated[
        str | None, _form(help="Regular expression that the whole answer matches. Default: none.")
    ] = None,
    choice: Annotated[
        list[str] | None, _form(help="A text that the answer may be; repeatable. Default: any text.")
    ] = None,
    grammar: Annotated[
        Path | None, _form(help="File of a Lark grammar of the answer. Default: none.")
    ] = None,
    prediction: Annotated[
        Path | None,
        _form(help="File of what the answer repeats for the most part: faster, same tokens. Default: none."),
    ] = None,
) -> GenerateOptions:
    """Return `options` with those of these flags. Raises BadParameter for an unusable file."""
    given = {"--schema": schema, "--regex": regex, "--choice": choice, "--grammar": grammar}
    forms = [flag for flag, value in given.items() if value]
    if len(forms) > 1:
        raise typer.BadParameter(f"cannot be combined with {forms[0]}", param_hint=forms[1])
    return options | {
        "schema": None if schema is None else _schema(schema),
        "regex": regex,
        "choice": choice or None,
        "grammar": None if grammar is None else _read(grammar, "--grammar"),
        "prediction": None if prediction is None else _read(prediction, "--prediction"),
    }


@functools.partial(with_flags_of, form_options, "options")
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
    outcome = show_stream(
        connection, lambda client: client.stream(whole, **options), view, summary=not as_json
    )
    parse = parser_of(options.get("schema"))
    if parse is not None:
        try:
            parse(outcome.text)
        except ValueError:
            raise fail("the answer ended before its JSON was complete; raise --max-tokens") from None


def _prompt(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        problem = "must be a text, or - for standard input, or be left out with --file"
        raise typer.BadParameter(problem, param_hint="PROMPT")
    if file is not None:
        return _read(file, "--file")
    return _text(sys.stdin.buffer.read(), "standard input") if prompt == "-" else str(prompt)


def _schema(file: Path) -> dict[str, object]:
    try:
        schema = json.loads(_read(file, "--schema"))
    except ValueError as error:
        raise typer.BadParameter(f"{file}: must be JSON: {error}", param_hint="--schema") from None
    if not isinstance(schema, dict):
        problem = f"{file}: must be a JSON object, got {type(schema).__name__}"
        raise typer.BadParameter(problem, param_hint="--schema")
    return schema


def _read(file: Path, flag: str) -> str:
    try:
        return _text(file.read_bytes(), flag)
    except OSError as error:
        raise typer.BadParameter(f"{file}: cannot be read: {error.strerror}", param_hint=flag) from None


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
