"""Read calls that a model writes as JSON objects: `{"name": ..., "arguments": {...}}`, or a list of them.

The text arrives in pieces. Where the name comes before the arguments, these are passed on as they arrive;
a call in another order is reported once it has ended.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Sequence
from functools import partial
from typing import TypeGuard

from services.gateway.http.tools.deltas import CallArguments, CallBegins, Delta

SPACE = " \t\r\n"
_BARE = frozenset(SPACE + ",:0123456789+-.eEtrufalsn")
"""Characters of JSON outside of texts, besides brackets."""
_LITERAL = frozenset("TrueFalseNoneNaNInfinity")
"""Characters of literals that Python has in place of JSON's, as models write them at times."""
_TEXT = r'"(?:[^"\\]|\\.)*"'
_TEXTS = re.compile(_TEXT)
_HEAD = re.compile(
    rf'\{{\s*(?:"(?:type|id)"\s*:\s*{_TEXT}\s*,\s*)*'
    rf'"name"\s*:\s*({_TEXT})\s*,\s*"(?:arguments|parameters)"\s*:\s*\{{',
    re.DOTALL,
)
_HALVES = re.compile("[\ud800-\udfff]")
_SIGN = re.compile("[\udff0-\udfff]")
"""Halves of surrogate pairs, which only escapes of JSON can write, and those that are signs of marks."""


class State(enum.Enum):
    """`FAILED`: the text is no call, or not one that can be read."""

    OPEN = 0
    DONE = 1
    FAILED = 2


class JsonScanner:
    """Follow the brackets of JSON, a character at a time; `depth` is the number of open ones.

    Python's literals are taken within more than `outer` brackets.
    """

    def __init__(self, outer: int = 0) -> None:
        self.depth = 0
        self._outer = outer
        self._in_text = False
        self._escapes = False

    def take(self, char: str) -> bool:
        """Read one character; return False if it is none of JSON, in the place where it stands."""
        if self._in_text:
            if self._escapes:
                self._escapes = False
            elif char == "\\":
                self._escapes = True
            elif char == '"':
                self._in_text = False
        elif char == '"':
            self._in_text = True
        elif char in "{[":
            self.depth += 1
        elif char in "}]":
            self.depth -= 1
        else:
            return char in _BARE or (char in _LITERAL and self.depth > self._outer)
        return True


def is_open(text: str) -> bool:
    """Return True if a bracket or a text of JSON is not closed at the end of `text`."""
    rest = _TEXTS.sub("", text)
    opened, closed = (sum(map(rest.count, brackets)) for brackets in ("{[", "}]"))
    return opened > closed or '"' in rest


class CallReader:
    """Read call number `index`. With `needs_arguments`, an object without them is no call."""

    def __init__(self, index: int, *, needs_arguments: bool) -> None:
        self.state = State.OPEN
        self.has_begun = False
        self._index = index
        self._needs_arguments = needs_arguments
        self._scanner = JsonScanner(outer=1)
        self._whole: list[str] | None = []
        """The text so far; None once the arguments are passed on."""
        self._in_arguments = False
        self._may_pass_on = True

    def push(self, text: str) -> tuple[int, Sequence[Delta]]:
        """Read up to the end of the call; return how many characters were read, and what they tell."""
        deltas: list[Delta] = []
        arguments: list[str] = []
        read = 0
        for char in text:
            if not self._take(char, arguments, deltas):
                break
            read += 1
            if self.state is not State.OPEN:
                break
        if arguments:
            deltas.append(CallArguments(self._index, "".join(arguments)))
        return read, deltas

    def _take(self, char: str, arguments: list[str], deltas: list[Delta]) -> bool:
        scanner = self._scanner
        starts_wrong = not scanner.depth and char != "{"
        if starts_wrong or not scanner.take(char):
            self.state = State.DONE if self.has_begun else State.FAILED
            return False
        if self._in_arguments:
            arguments.append(char)
            self._in_arguments = scanner.depth > 1
        elif self._whole is not None:
            self._whole.append(char)
            if char == "{" and scanner.depth > 1 and self._may_pass_on:
                self._may_pass_on = False
                if (name := _head_name("".join(self._whole))) is not None:
                    deltas.append(self._begin(name))
                    arguments.append(char)
                    self._whole, self._in_arguments = None, True
        if not scanner.depth:
            self._end(deltas)
        return True

    def _begin(self, name: str) -> Delta:
        self.has_begun = True
        return CallBegins(self._index, name)

    def _end(self, deltas: list[Delta]) -> None:
        """Report a call whose arguments were not passed on."""
        self.state = State.DONE
        if self._whole is None:
            return
        call = _call_of("".join(self._whole))
        if call is None or (call[1] is None and self._needs_arguments):
            self.state = State.FAILED
            return
        name, arguments = call
        deltas += [self._begin(name), CallArguments(self._index, arguments or "{}")]


def _head_name(text: str) -> str | None:
    """Return the name in the text of a call up to its arguments; None if they do not follow it."""
    head = _HEAD.fullmatch(text)
    name = None if head is None else _json_of(head[1])
    return name if _is_name(name) else None


def _call_of(text: str) -> tuple[str, str | None] | None:
    """Return the name and the arguments of a call."""
    value = _json_of(text)
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not _is_name(name):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if arguments is not None and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    signs = frozenset(_SIGN.findall(text))
    return name, None if arguments is None else _HALVES.sub(partial(_escape, signs), arguments)


def _is_name(value: object) -> TypeGuard[str]:
    """Return True for a text of visible characters: not, for example, the half of a surrogate pair."""
    return isinstance(value, str) and bool(value) and value.isprintable()


def _escape(signs: frozenset[str], half: re.Match[str]) -> str:
    return half[0] if half[0] in signs else f"\\u{ord(half[0]):04x}"


def _json_of(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


class CallsReader:
    """Read one call, or a list of calls; the first has number `index`."""

    def __init__(self, index: int, *, needs_arguments: bool = False) -> None:
        self.state = State.OPEN
        self.next_index = index
        """The number of the next call."""
        self._needs_arguments = needs_arguments
        self._in_list = False
        self._has_ended_one = False
        self._call: CallReader | None = None

    @property
    def has_begun(self) -> bool:
        return self._has_ended_one or (self._call is not None and self._call.has_begun)

    def push(self, text: str) -> tuple[int, Sequence[Delta]]:
        """Read up to the end of the calls; return how many characters were read, and what they tell."""
        deltas: list[Delta] = []
        at = 0
        while at < len(text) and self.state is State.OPEN:
            if self._call is None:
                at += self._take_between(text[at])
                continue
            read, more = self._call.push(text[at:])
            at += read
            deltas += more
            if self._call.state is not State.OPEN:
                self._end_call(self._call)
        return at, deltas

    def _take_between(self, char: str) -> int:
        """Read a character outside of calls; return 0 if it belongs to a call or to what follows."""
        if char == "{":
            self._call = CallReader(self.next_index, needs_arguments=self._needs_arguments)
            return 0
        if char == "[" and not self._in_list and not self._has_ended_one:
            self._in_list = True
        elif char == "]" and self._in_list:
            self.state = State.DONE
        elif char not in SPACE and not (char == "," and self._in_list):
            self.state = State.DONE if self._has_ended_one else State.FAILED
            return 0
        return 1

    def _end_call(self, call: CallReader) -> None:
        self._call = None
        if call.state is State.FAILED:
            self.state = State.DONE if self._has_ended_one else State.FAILED
            return
        self._has_ended_one = True
        self.next_index += 1
        if not self._in_list:
            self.state = State.DONE
