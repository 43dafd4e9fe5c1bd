"""The parts of an answer that a client can tell apart, each as far as the text so far decides it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol


class Content(NamedTuple):
    text: str


class Reasoning(NamedTuple):
    text: str


class CallBegins(NamedTuple):
    """Call `number` of the answer, from 0, calls the function `name`."""

    number: int
    name: str


class CallArguments(NamedTuple):
    """More of the arguments of call `number`, which are the text of a JSON object."""

    number: int
    text: str


Delta = Content | Reasoning | CallBegins | CallArguments


class Parser(Protocol):
    """Read the text of an answer, which may arrive in any pieces: the joined deltas are the same."""

    def push(self, text: str) -> Sequence[Delta]: ...

    def finish(self) -> Sequence[Delta]:
        """Return what was held back, once no text follows."""


class PlainText:
    """Read an answer that is content alone."""

    def push(self, text: str) -> Sequence[Delta]:
        return [Content(text)] if text else []

    def finish(self) -> Sequence[Delta]:
        return []


class MarkerSearch:
    """Find a marker in text that arrives in pieces.

    Text is held back while it ends in whitespace, or may become the marker.
    """

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._held = ""

    def push(self, text: str) -> tuple[str, str, str | None]:
        """Return the text before the marker, the whitespace between, and what follows the marker.

        The last is None if the marker has not come.
        """
        held = self._held + text
        before, marker, after = held.partition(self._marker)
        if marker:
            self._held = ""
            sure = before.rstrip()
            return sure, before[len(sure) :], after
        sure = held[: len(held) - begun_length(held, self._marker)].rstrip()
        self._held = held[len(sure) :]
        return sure, "", None

    def finish(self) -> str:
        """Return the text that was held back."""
        held, self._held = self._held, ""
        return held


def begun_length(text: str, marker: str) -> int:
    """Return how many characters at the end of `text` may begin `marker`: as many as possible."""
    sizes = range(min(len(text), len(marker) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(marker[:size])), 0)


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """Return the deltas with neighbours of one kind as one."""
    whole: list[Delta] = []
    for delta in deltas:
        match whole[-1:], delta:
            case [Content(text)], Content(more):
                whole[-1] = Content(text + more)
            case [Reasoning(text)], Reasoning(more):
                whole[-1] = Reasoning(text + more)
            case [CallArguments(number, text)], CallArguments(same, more) if number == same:
                whole[-1] = CallArguments(number, text + more)
            case _:
                whole.append(delta)
    return whole
