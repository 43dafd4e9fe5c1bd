"""`galley chat`: talk with the model."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from galley.cli.chat.commands import BadCommand, Chat, obey
from galley.cli.chat.conversation import AnswerStats, Conversation
from galley.cli.chat.reader import message_reader
from galley.cli.flags import (
    FAILED,
    Connection,
    Origins,
    say,
    stderr_console,
    with_answer_flags,
    with_connection_flags,
    wrong_flag,
)
from galley.client.options import GenerateOptions

if TYPE_CHECKING:
    from galley.cli.answer import Outcome, View
    from galley.pb.galley.v1 import galley_pb2 as pb

_INFO_TIMEOUT_S = 2.0


@with_answer_flags
@with_connection_flags
def chat(
    *,
    options: GenerateOptions,
    connection: Connection,
    system: Annotated[str, typer.Option(help="A system message to begin with. Default: none.")] = "",
    origins: Origins = False,
    stats: Annotated[
        bool | None,
        typer.Option(
            "--stats/--no-stats",
            help="Print a line of statistics after each answer. Default: on a terminal.",
            show_default=False,
        ),
    ] = None,
    keep_history: Annotated[
        bool,
        typer.Option("--history/--no-history", help="Keep the messages that you type, for the next chat."),
    ] = True,
) -> None:
    """Talk with the model, one turn after the other; /help lists the commands.

    Unless messages come from a terminal, the exit code is 1 if a line was refused or an answer failed.
    """
    console = Console(highlight=False)
    state = Chat(
        Conversation(system),
        options,
        lambda: _default_sampling(connection),
        stats=console.is_terminal if stats is None else stats,
    )
    read = message_reader(keeps_history=keep_history)
    say("/help lists the commands. Ctrl-C stops an answer, Ctrl-D ends the chat.")
    _show_origins(state, console, is_wanted=origins)
    while not state.is_over and (line := read()) is not None:
        _take(state, connection, console, line)
    if state.has_failed and not sys.stdin.isatty():
        raise typer.Exit(FAILED)


def _take(state: Chat, connection: Connection, console: Console, line: str) -> None:
    """Obey a command, or answer a message."""
    state.to_send = line.removeprefix("/") if line.startswith("//") else line
    if line.startswith("/") and not line.startswith("//"):
        state.to_send = ""
        origins = state.origins
        try:
            printed = obey(state, line)
        except BadCommand as error:
            _refuse(state, str(error))
            return
        if printed:
            say(printed)
        if state.origins and not origins:
            _show_origins(state, console, is_wanted=True)
    if not _is_text(state.to_send):
        _refuse(state, "standard input: must be UTF-8 text")
    elif state.to_send:
        _answer(state, connection, console, state.to_send)


def _refuse(state: Chat, problem: str) -> None:
    say(f"error: {problem}", style="red")
    state.has_failed = True


def _is_text(line: str) -> bool:
    # What is not UTF-8 comes as U+FFFD from standard input, as lone surrogates from the editor.
    return not any(one == "\N{REPLACEMENT CHARACTER}" or "\ud800" <= one <= "\udfff" for one in line)


def _show_origins(state: Chat, console: Console, *, is_wanted: bool) -> None:
    state.origins = is_wanted
    if is_wanted:
        from galley.cli.answer import legend  # noqa: PLC0415  # grpc is slow to load

        stderr_console().print(legend(console), soft_wrap=True)


def _answer(state: Chat, connection: Connection, console: Console, text: str) -> None:
    """Show the answer and keep it, also as far as it came before Ctrl-C."""
    from galley.cli.answer import TextView, report_error, show  # noqa: PLC0415  # grpc is slow to load

    messages, options = state.conversation.messages(text), state.options
    view = TextView(console, origins=state.origins, logprobs=options.get("logprobs") is not None)
    clock = _Clock(view)
    outcome = show(connection, lambda client: client.stream(messages, **options), clock)
    if outcome.error is not None or (outcome.is_stopped and not outcome.text):
        state.conversation.unanswered = text
        if outcome.error is not None:
            usage = wrong_flag(getattr(outcome.error, "violations", ()))
            if usage is not None and not state.conversation.turns and not state.has_set:
                raise usage
            report_error(outcome.error, outcome.stream)
            state.has_failed = True
        return
    state.conversation.add(text, outcome.text)
    stats = clock.stats(outcome)
    _count(state, stats)
    if outcome.is_stopped:
        say("stopped; the answer so far is kept. /retry asks again, /undo removes it")
    if state.stats:
        say(stats.line())


def _count(state: Chat, stats: AnswerStats) -> None:
    totals = state.totals
    totals.answers += 1
    for name in ("tokens", "seconds", "rounds", "verified", "accepted"):
        setattr(totals, name, getattr(totals, name) + getattr(stats, name))


class _Clock:
    """A view that notes when the first token came."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._began_s = time.perf_counter()
        self._first_s = 0.0

    def show(self, event: pb.StreamEvent) -> None:
        if not self._first_s and event.chunk.token_ids:
            self._first_s = time.perf_counter() - self._began_s
        self._view.show(event)

    def close(self) -> None:
        self._view.close()

    def stats(self, outcome: Outcome) -> AnswerStats:
        """Return the figures of an answer that has just ended."""
        seconds, stream = time.perf_counter() - self._began_s, outcome.stream
        finished: Any = stream.finished.speculation if stream is not None and stream.finished else None
        counts = [getattr(finished, name, 0) for name in ("rounds", "verified", "accepted")]
        tokens = 0 if stream is None else len(stream.tokens)
        return AnswerStats(tokens, seconds, self._first_s, *counts)


def _default_sampling(connection: Connection) -> Mapping[str, float]:
    """Return the model's own sampling; empty if the gateway does not answer soon."""
    from galley.cli.answer import client_of  # noqa: PLC0415  # grpc is slow to load
    from galley.client.errors import BadKey, GalleyRpcError  # noqa: PLC0415

    async def fetch() -> Mapping[str, float]:
        async with client_of(connection) as client:
            info = await client.model_info(timeout_s=_INFO_TIMEOUT_S)
            return {field.name: value for field, value in info.default_sampling.ListFields()}

    try:
        return asyncio.run(fetch())
    except (BadKey, GalleyRpcError):
        return {}
