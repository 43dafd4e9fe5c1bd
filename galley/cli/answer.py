"""Show a stream as it comes: as text for people, as JSON lines for programs."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import grpc
import grpc.aio
import typer
from google.protobuf.json_format import MessageToJson
from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.text import Text

from galley.cli.flags import INTERRUPTED, Connection, fail_call, say, stderr_console, wrong_flag
from galley.client.client import AsyncClient
from galley.client.errors import BadKey, GalleyRpcError
from galley.client.options import Retries
from galley.client.result import speculation_usage
from galley.client.streams import AsyncStream
from galley.common.printable import one_line, printable
from galley.pb.galley.v1 import galley_pb2 as pb

DRAFT_COLOUR = "green"
_LONGEST_TOKEN = 40
"""Characters of a token in a table."""
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


_Row: TypeAlias = tuple[str, str, str, str]
"""Index, token, log-probability, likeliest tokens."""


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
    the likeliest tokens. Tokens are quoted texts, or ids where the gateway sends no text.
    """

    def __init__(self, console: Console, *, origins: bool = False, logprobs: bool = False) -> None:
        self._console = console
        self._origins = origins
        self._logprobs = logprobs
        self._rows: list[_Row] = []
        self._bracket_is_open = False
        self._last = "\n"

    def show(self, event: pb.StreamEvent) -> None:
        """Write the text of a chunk; keep its log-probabilities."""
        chunk = event.chunk
        for text, from_draft in _pieces(chunk):
            self._bracket(is_open=from_draft)
            self._write(text, from_draft=from_draft)
        for at, (token_id, entry) in enumerate(zip(chunk.token_ids, chunk.logprobs, strict=False)):
            top = [f"{_label(one.token_id, one.token_bytes)} {one.logprob:.3f}" for one in entry.top]
            token = _label(token_id, entry.token_bytes)
            self._rows.append((str(chunk.index + at), token, f"{entry.logprob:.3f}", ", ".join(top)))

    def close(self) -> None:
        self._bracket(is_open=False)
        if self._last != "\n":
            self._write("\n")
        if self._logprobs and self._rows:
            self._write("\n" + _table([("index", "token", "logprob", "likeliest tokens"), *self._rows]))

    def _bracket(self, *, is_open: bool) -> None:
        if self._origins and not self._console.is_terminal and is_open != self._bracket_is_open:
            self._write("[" if is_open else "]")
            self._bracket_is_open = is_open

    def _write(self, text: str, *, from_draft: bool = False) -> None:
        is_terminal = self._console.is_terminal
        safe = printable(text) if is_terminal else text
        if is_terminal and self._origins and from_draft:
            self._console.print(Text(safe, draft_style(self._console)), end="", soft_wrap=True)
        else:
            self._write_unchanged(safe)
        self._last = text[-1]

    def _write_unchanged(self, text: str) -> None:
        # rich would leave out some control characters and replace tabs.
        try:
            self._console.file.write(text)
            self._console.file.flush()
        except BrokenPipeError:
            self._console.on_broken_pipe()


View: TypeAlias = JsonView | TextView


class Watcher(Protocol):
    """A view, or one that wraps it."""

    def show(self, event: pb.StreamEvent) -> None: ...

    def close(self) -> None: ...


def _table(rows: Sequence[_Row]) -> str:
    width = max(8, *(cell_len(token) for _, token, *_ in rows))
    lines = (
        f"{index:>6} {' ' * (width - cell_len(token))}{token} {logprob:>9}  {top}".rstrip() + "\n"
        for index, token, logprob, top in rows
    )
    return "".join(lines)


def _label(token_id: int, data: bytes) -> str:
    """Return a token's text as a literal of Python, cut to one short line; its id if it has no text.

    A literal has escapes for all characters that are not printable. Parts of characters are a `b''` literal.
    """
    if not data:
        return str(token_id)
    try:
        literal = repr(data.decode())
    except UnicodeDecodeError:
        literal = repr(data)
    return one_line(literal, _LONGEST_TOKEN)


def view_of(*, as_json: bool, origins: bool, logprobs: bool = False) -> View:
    if as_json:
        return JsonView()
    console = Console(highlight=False)
    if origins:
        stderr_console().print(legend(console), soft_wrap=True)
    return TextView(console, origins=origins, logprobs=logprobs)


def draft_style(console: Console) -> Style:
    return Style(underline=True) if console.no_color else Style(color=DRAFT_COLOUR)


def _pieces(chunk: pb.Chunk) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a chunk's text, each with whether the draft proposed it."""
    start, ends = 0, chunk.text_ends
    if len(ends) == len(chunk.from_draft):
        for end, from_draft in zip(ends, chunk.from_draft, strict=True):
            if text := chunk.text[start:end]:
                yield text, from_draft
            start = max(start, end)
    if text := chunk.text[start:]:
        yield text, any(chunk.from_draft)


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


@dataclass(slots=True)
class Outcome:
    """A stream as far as it was shown: to its end, to Ctrl-C (`is_stopped`), or to an error."""

    stream: AsyncStream | None = None
    error: BadKey | GalleyRpcError | None = None
    is_stopped: bool = False

    @property
    def text(self) -> str:
        return "" if self.stream is None else self.stream.output.text


def show(connection: Connection, start: Callable[[AsyncClient], AsyncStream], view: Watcher) -> Outcome:
    """Show the stream until it ends or breaks."""
    outcome = Outcome()
    try:
        asyncio.run(_show(connection, start, view, outcome))
    except KeyboardInterrupt:
        outcome.is_stopped = True
    except (BadKey, GalleyRpcError) as error:
        outcome.error = error
    return outcome


def show_stream(
    connection: Connection, start: Callable[[AsyncClient], AsyncStream], view: View, *, summary: bool = True
) -> Outcome:
    """Show the stream to its end. If it breaks, raise typer.Exit and, if useful, say how to resume."""
    outcome = show(connection, start, view)
    if outcome.is_stopped:
        _say_how_to_resume(outcome.stream)
        raise typer.Exit(INTERRUPTED)
    if outcome.error is not None:
        if (usage := wrong_flag(getattr(outcome.error, "violations", ()))) is not None:
            raise usage
        raise report_error(outcome.error, outcome.stream)
    if summary and outcome.stream is not None and outcome.stream.finished is not None:
        say(summary_line(outcome.stream.session_id, outcome.stream.finished))
    return outcome


def report_error(error: BadKey | GalleyRpcError, stream: AsyncStream | None) -> typer.Exit:
    """Print the error of a stream and, if useful, how to resume it. Return the exception to raise."""
    if not (isinstance(error, GalleyRpcError) and error.code in _FINAL):
        _say_how_to_resume(stream)
    return fail_call(error)


def client_of(connection: Connection, interceptors: Sequence[grpc.aio.ClientInterceptor] = ()) -> AsyncClient:
    return AsyncClient(
        connection.addresses,
        retries=Retries(connection.patience_s),
        tls=connection.tls,
        interceptors=interceptors,
    )


async def _show(
    connection: Connection, start: Callable[[AsyncClient], AsyncStream], view: Watcher, outcome: Outcome
) -> None:
    try:
        from galley.common.tracing.telemetry import start_telemetry  # noqa: PLC0415  # an extra
    except ImportError:
        telemetry = None
    else:
        telemetry = start_telemetry("galley-cli", as_global=False)
    try:
        async with client_of(connection, telemetry.client_interceptors() if telemetry else ()) as client:
            try:
                outcome.stream = start(client)
            except BadKey:
                raise
            except (TypeError, ValueError) as error:
                field, _, problem = str(error).partition(": ")
                raise wrong_flag([(field, problem)]) or typer.BadParameter(str(error)) from None
            async for event in outcome.stream:
                view.show(event)
    finally:
        view.close()
        if telemetry is not None:
            telemetry.shutdown()


def _say_how_to_resume(stream: AsyncStream | None) -> None:
    if stream is not None and _SAFE_ARGUMENT.fullmatch(stream.session_id):
        point = stream.resume_from()
        say(f"to continue: galley resume {point.session_id} --next-index {point.next_index}")
