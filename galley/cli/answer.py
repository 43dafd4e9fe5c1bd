"""Show a stream as it comes: as text for people, as JSON lines for programs."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable
from typing import TypeAlias

import grpc
import typer
from google.protobuf.json_format import MessageToJson
from rich.console import Console
from rich.style import Style
from rich.text import Text

from galley.cli.flags import INTERRUPTED, Connection, fail, say, stderr_console
from galley.client.client import AsyncClient
from galley.client.errors import BadKey, GalleyRpcError
from galley.client.options import Retries
from galley.client.result import speculation_usage
from galley.client.streams import AsyncStream
from galley.common.printable import one_line, printable
from galley.pb.galley.v1 import galley_pb2 as pb

DRAFT_COLOUR = "green"
# Statuses after which the session cannot be resumed, so that no command for it is printed.
_FINAL = frozenset(
    {
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
# A hostile gateway's session id could hold a flag or a command of the shell.
_SAFE_ARGUMENT = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,255}")


class JsonView:
    """One JSON object a line: the proto's JSON mapping with its field names; 64-bit numbers are strings."""

    def show(self, event: pb.StreamEvent) -> None:
        sys.stdout.write(MessageToJson(event, preserving_proto_field_name=True, indent=None) + "\n")
        sys.stdout.flush()

    def close(self) -> None:
        """Do nothing: each line is complete."""


class TextView:
    """The text of an answer, with a line break at its end.

    On a terminal, U+FFFD replaces each character that the terminal would interpret; a file or pipe gets the
    text as it is.

    With `origins`, tokens that the draft proposed are green, on a terminal without colours underlined, and
    elsewhere in brackets. With `logprobs`, a line for each token follows the text: its log-probability and
    the likeliest tokens.
    """

    def __init__(self, console: Console, *, origins: bool = False, logprobs: bool = False) -> None:
        self._console = console
        self._origins = origins
        self._logprobs = logprobs
        self._lines: list[str] = []
        self._bracket_is_open = False
        self._last = "\n"

    def show(self, event: pb.StreamEvent) -> None:
        """Write the text of a chunk, whose tokens have one origin; keep its log-probabilities."""
        chunk = event.chunk
        if chunk.text:
            from_draft = any(chunk.from_draft)
            self._bracket(is_open=from_draft)
            self._write(chunk.text, from_draft=from_draft)
        for at, (token_id, entry) in enumerate(zip(chunk.token_ids, chunk.logprobs, strict=False)):
            top = ", ".join(f"{one.token_id} {one.logprob:.3f}" for one in entry.top)
            self._lines.append(f"{chunk.index + at:>6} {token_id:>8} {entry.logprob:>9.3f}  {top}".rstrip())

    def close(self) -> None:
        self._bracket(is_open=False)
        if self._last != "\n":
            self._write("\n")
        if self._logprobs and self._lines:
            self._write("\n".join(("\n index    token   logprob  likeliest tokens", *self._lines, "")))

    def _bracket(self, *, is_open: bool) -> None:
        if self._origins and not self._console.is_terminal and is_open != self._bracket_is_open:
            self._write("[" if is_open else "]")
            self._bracket_is_open = is_open

    def _write(self, text: str, *, from_draft: bool = False) -> None:
        safe = printable(text) if self._console.is_terminal else text
        if self._origins and from_draft:
            self._console.print(Text(safe, draft_style(self._console)), end="", soft_wrap=True)
        else:
            self._console.file.write(safe)
            self._console.file.flush()
        self._last = text[-1]


View: TypeAlias = JsonView | TextView


def view_of(*, as_json: bool, origins: bool, logprobs: bool = False) -> View:
    if as_json:
        return JsonView()
    console = Console(highlight=False)
    if origins:
        stderr_console().print(legend(console), soft_wrap=True)
    return TextView(console, origins=origins, logprobs=logprobs)


def draft_style(console: Console) -> Style:
    return Style(underline=True) if console.no_color else Style(color=DRAFT_COLOUR)


def legend(console: Console) -> Text:
    if not console.is_terminal:
        return Text("[in brackets]: proposed by the draft; the rest: supplied by the target")
    return Text.assemble(("proposed by the draft", draft_style(console)), " · supplied by the target")


def reason(finished: pb.Finished) -> str:
    match finished.WhichOneof("matched_stop"):
        case "stop":
            return f"stop string {finished.stop!r}"
        case "stop_token_id":
            return f"stop token {finished.stop_token_id}"
        case _:
            known = pb.Finished.Reason.DESCRIPTOR.values_by_number.get(finished.reason)
            return (
                f"reason {finished.reason}" if known is None else known.name.removeprefix("REASON_").lower()
            )


def summary_line(session_id: str, finished: pb.Finished) -> str:
    stats, usage = speculation_usage(finished.speculation), finished.usage
    return (
        f"session {one_line(session_id)} · {usage.prompt_tokens} + {usage.output_tokens} tokens · "
        f"{stats.rounds} rounds · "
        f"mean accepted length {stats.mean_accepted_length:.2f} · ended by {reason(finished)}"
    )


def show_stream(
    connection: Connection, start: Callable[[AsyncClient], AsyncStream], view: View, *, summary: bool = True
) -> str:
    """Show the stream, return its text. If it breaks, raise typer.Exit and, if useful, say how to resume."""
    streams: list[AsyncStream] = []
    try:
        text = asyncio.run(_show(connection, start, view, streams))
    except KeyboardInterrupt:
        _say_how_to_resume(streams)
        raise typer.Exit(INTERRUPTED) from None
    except (BadKey, GalleyRpcError) as error:
        if not (isinstance(error, GalleyRpcError) and error.code in _FINAL):
            _say_how_to_resume(streams)
        raise fail(error) from None
    [stream] = streams
    if summary and stream.finished is not None:
        say(summary_line(stream.session_id, stream.finished))
    return text


async def _show(
    connection: Connection,
    start: Callable[[AsyncClient], AsyncStream],
    view: View,
    streams: list[AsyncStream],
) -> str:
    try:
        from galley.common.tracing.telemetry import start_telemetry  # noqa: PLC0415  # an extra
    except ImportError:
        telemetry = None
    else:
        telemetry = start_telemetry("galley-cli", as_global=False)
    client = AsyncClient(
        connection.addresses,
        retries=Retries(connection.patience_s),
        tls=connection.tls,
        interceptors=telemetry.client_interceptors() if telemetry else (),
    )
    text = ""
    try:
        async with client:
            streams.append(start(client))
            async for event in streams[0]:
                text += event.chunk.text
                view.show(event)
    finally:
        view.close()
        if telemetry is not None:
            telemetry.shutdown()
    return text


def _say_how_to_resume(streams: list[AsyncStream]) -> None:
    for stream in streams:
        if _SAFE_ARGUMENT.fullmatch(stream.session_id):
            point = stream.resume_from()
            say(f"to continue: galley resume {point.session_id} --next-index {point.next_index}")
