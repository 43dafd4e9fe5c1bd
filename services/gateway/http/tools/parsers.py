"""Find the calls of tools in the text of an answer, in the forms that models are trained to write.

A text that only begins like a call is content, as far as none of it was reported as a call.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Sequence
from typing import Protocol

from services.gateway.http.tools.deltas import (
    CallArguments,
    CallBegins,
    Content,
    Delta,
    MarkerSearch,
    Parser,
)
from services.gateway.http.tools.json_calls import SPACE, CallsReader, JsonScanner, State

_MISTRAL_HEAD = re.compile(r"([A-Za-z0-9_.:-]{1,64})(?:\[CALL_ID\][A-Za-z0-9]{0,64})?(?:\[ARGS\])?[ \n]{0,8}")
_MOST_HEAD_CHARS = 64 + 64 + 32
_PYTHON_TAG = "<|python_tag|>"


class _Body(Protocol):
    """Read the calls behind a marker; `next_index` is the number of the call after them."""

    state: State
    next_index: int

    @property
    def has_begun(self) -> bool:
        """Return True once a call was reported."""

    def push(self, text: str) -> tuple[int, Sequence[Delta]]:
        """Read up to the end of the calls; return how many characters were read, and what they tell."""


class _Step(enum.Enum):
    TEXT = 0
    BODY = 1
    CLOSE = 2


class MarkedCalls(Parser):
    """Read text with calls, each behind the marker `opening` and before `closing`, which may be empty."""

    def __init__(self, opening: str, closing: str, body: Callable[[int], _Body]) -> None:
        self._opening = opening
        self._closing = closing
        self._new_body = body
        self._search = MarkerSearch(opening)
        self._body = body(0)
        self._step = _Step.TEXT
        self._held = ""
        """Text that may become a call, with its marker; after a call, text that may close it."""

    def push(self, text: str) -> Sequence[Delta]:
        deltas: list[Delta] = []
        steps = {_Step.TEXT: self._read_text, _Step.BODY: self._read_body, _Step.CLOSE: self._read_close}
        while text:
            text = steps[self._step](text, deltas)
        return deltas

    def finish(self) -> Sequence[Delta]:
        rest = ""
        if self._step is _Step.TEXT:
            rest = self._search.finish()
        elif self._step is _Step.BODY and not self._body.has_begun:
            rest = self._held
        return [Content(rest)] if rest and not (rest.isspace() and self._body.next_index) else []

    def _read_text(self, text: str, deltas: list[Delta]) -> str:
        before, space, after = self._search.push(text)
        if before:
            deltas.append(Content(before))
        if after is not None:
            self._held = space + self._opening
            self._body = self._new_body(self._body.next_index)
            self._step = _Step.BODY
        return after or ""

    def _read_body(self, text: str, deltas: list[Delta]) -> str:
        read, more = self._body.push(text)
        deltas += more
        if not self._body.has_begun:
            self._held += text[:read]
        if self._body.state is State.DONE:
            self._step, self._held = _Step.CLOSE, ""
        elif self._body.state is State.FAILED:
            self._step = _Step.TEXT
            deltas.append(Content(self._held))
        return text[read:]

    def _read_close(self, text: str, deltas: list[Delta]) -> str:  # noqa: ARG002  # tells nothing
        """Skip the closing marker, and brackets too many before it."""
        held = (self._held + text).lstrip(SPACE + "}]") if self._closing else text
        if self._closing and self._closing.startswith(held):
            self._held = held
            if held != self._closing:
                return ""
            held = ""
        self._step = _Step.TEXT
        return held.removeprefix(self._closing)


def hermes_calls(opening: str = "<tool_call>") -> Parser:
    """Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` of Hermes and Qwen."""
    return MarkedCalls(opening, "</tool_call>", CallsReader)


def mistral_calls(opening: str = "[TOOL_CALLS]") -> Parser:
    """Read Mistral's calls.

    All stand in a list behind `[TOOL_CALLS]`. With newer models that marker precedes each call, which is
    `name[ARGS]{...}`, with `[CALL_ID]` and an id after the name or without.
    """
    return MarkedCalls(opening, "", _MistralBody)


class _MistralBody:
    def __init__(self, index: int) -> None:
        self.state = State.OPEN
        self.next_index = index
        self.has_begun = False
        self._list: CallsReader | None = None
        self._head = ""
        self._scanner = JsonScanner()

    def push(self, text: str) -> tuple[int, Sequence[Delta]]:
        if self._list is None and not self._head and text.lstrip(SPACE)[:1] in {"[", "{"}:
            self._list = CallsReader(self.next_index)
        if self._list is not None:
            read, deltas = self._list.push(text)
            self.state, self.next_index = self._list.state, self._list.next_index
            self.has_begun = self._list.has_begun
            return read, deltas
        return self._push_arguments(text) if self.has_begun else self._push_head(text)

    def _push_head(self, text: str) -> tuple[int, Sequence[Delta]]:
        """Read the name of a call with the marks up to its arguments."""
        before, brace, _ = text.partition("{")
        self._head = (self._head + before).lstrip(SPACE)
        head = _MISTRAL_HEAD.fullmatch(self._head)
        if not brace and len(self._head) <= _MOST_HEAD_CHARS:
            return len(text), []
        if head is None:
            self.state = State.FAILED
            return len(before), []
        self.has_begun = True
        begin = CallBegins(self.next_index, head[1])
        read, deltas = self._push_arguments(text[len(before) :])
        return len(before) + read, [begin, *deltas]

    def _push_arguments(self, text: str) -> tuple[int, Sequence[Delta]]:
        read = 0
        for char in text:
            if not self._scanner.take(char):
                self.state = State.DONE
                break
            read += 1
            if not self._scanner.depth:
                self.state = State.DONE
                break
        arguments = [CallArguments(self.next_index, text[:read])] if read else []
        if self.state is State.DONE:
            self.next_index += 1
        return read, arguments


class BareCalls(Parser):
    """Read an answer that is nothing but calls, as Llama 3 writes them, or else is text.

    Calls are `{"name": ..., "parameters": {...}}`, separated by `;`, maybe behind `<|python_tag|>`.
    """

    def __init__(self) -> None:
        self._body: CallsReader | None = None
        self._next_index = 0
        self._is_text = False
        self._held = ""

    def push(self, text: str) -> Sequence[Delta]:
        deltas: list[Delta] = []
        while text:
            if self._is_text:
                return [*deltas, Content(text)]
            text = self._read_start(text) if self._body is None else self._read_body(self._body, text, deltas)
        return deltas

    def finish(self) -> Sequence[Delta]:
        is_call = self._body is not None and self._body.has_begun
        is_text = self._held.strip(SPACE + ";") or (self._held and not self._next_index)
        return [Content(self._held)] if is_text and not is_call else []

    def _read_start(self, text: str) -> str:
        """Skip what may stand before a call; return the rest, for which it is decided what it is."""
        held = self._held + text
        start = held.lstrip(SPACE + ";" if self._next_index else SPACE)
        bare = start.removeprefix(_PYTHON_TAG).lstrip(SPACE) if start.startswith(_PYTHON_TAG) else start
        if bare.startswith(("{", "[")):
            self._held = held[: len(held) - len(bare)]
            self._body = CallsReader(self._next_index, needs_arguments=True)
            return bare
        if bare and not (bare is start and _PYTHON_TAG.startswith(start)):
            self._is_text, self._held = True, ""
            return held
        self._held = held
        return ""

    def _read_body(self, body: CallsReader, text: str, deltas: list[Delta]) -> str:
        read, more = body.push(text)
        deltas += more
        self._held += "" if body.has_begun else text[:read]
        if body.state is State.DONE:
            self._body, self._next_index, self._held = None, body.next_index, ""
        elif body.state is State.FAILED:
            held, self._held, self._is_text = self._held, "", True
            return held + text[read:]
        elif body.has_begun:
            self._held = ""
        return text[read:]
