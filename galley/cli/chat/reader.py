"""Read the next message: with an editor on a terminal, else a line of standard input."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from galley.cli.chat.commands import COMMANDS
from galley.cli.flags import say

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

Reader = Callable[[], str | None]
_DUMB = {"", "dumb", "unknown"}


def history_file() -> Path:
    """Return where messages are kept over runs: $XDG_STATE_HOME/galley/chat_history."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "galley" / "chat_history"


def message_reader(*, keeps_history: bool) -> Reader:
    """Return a function that returns the next message, or None at the end of the input."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM", "") in _DUMB:
        return _read_line
    return _editor(keeps_history=keeps_history)


def _read_line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None


def _editor(*, keeps_history: bool) -> Reader:
    from prompt_toolkit import PromptSession  # noqa: PLC0415  # slow to load
    from prompt_toolkit.completion import WordCompleter  # noqa: PLC0415
    from prompt_toolkit.filters import Condition  # noqa: PLC0415
    from prompt_toolkit.history import InMemoryHistory  # noqa: PLC0415

    session: PromptSession[str] = PromptSession(
        history=_kept_history(history_file()) if keeps_history else InMemoryHistory(),
        multiline=True,
        prompt_continuation=". ",
        key_bindings=_keys(),
        completer=WordCompleter([f"/{name}" for name in COMMANDS], sentence=True),
        complete_while_typing=Condition(lambda: False),
    )

    def read() -> str | None:
        try:
            return session.prompt("> ").strip()
        except EOFError:
            return None

    return read


def _keys() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings  # noqa: PLC0415  # slow to load

    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def _clear_or_end(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=EOFError)

    return keys


def _kept_history(path: Path) -> History:
    from prompt_toolkit.history import FileHistory, InMemoryHistory  # noqa: PLC0415  # slow to load

    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Messages are as private as the conversation: only the owner may read the file.
        file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
        os.fchmod(file, 0o600)
        os.close(file)
    except OSError as error:
        say(f"{path}: history is not kept: {error.strerror}")
        return InMemoryHistory()
    return FileHistory(path)
