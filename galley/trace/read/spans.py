"""Spans as they are read: plain values, whatever system wrote them.

What attributes hold is not to be trusted: the getters answer with a default where the type is another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeGuard

from galley.core import names

Value: TypeAlias = "str | bool | int | float | tuple[Value, ...] | Mapping[str, Value] | None"
Attributes: TypeAlias = "Mapping[str, Value]"
SpanKey: TypeAlias = tuple[str, str]
"""Trace id and span id, in lower-case hex."""

SERVER, CLIENT = 2, 3
ERROR = 2


@dataclass(frozen=True, slots=True)
class Process:
    """The process that wrote a span: its service and `service.instance.id`, a random name."""

    service: str
    instance: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened within a span."""

    name: str
    time_ns: int
    attributes: Attributes = field(default_factory=dict)

    def text(self, key: str) -> str:
        """Return the attribute, if it is a string; else empty."""
        return _text(self.attributes, key)

    def integer(self, key: str) -> int:
        """Return the attribute, if it is a number of at least 0; else 0."""
        return _integer(self.attributes, key)


@dataclass(frozen=True, slots=True)
class Link:
    """Another span that has to do with one."""

    trace_id: str
    span_id: str
    attributes: Attributes = field(default_factory=dict)

    @property
    def key(self) -> SpanKey:
        """Return the key of the linked span."""
        return self.trace_id, self.span_id


@dataclass(frozen=True, slots=True)
class Span:
    """One span; times are of the clock of its process, in nanoseconds since 1970."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start_ns: int
    end_ns: int
    process: Process
    kind: int = 0
    status: int = 0
    problem: str = ""
    attributes: Attributes = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    links: tuple[Link, ...] = ()

    @property
    def key(self) -> SpanKey:
        """Unique over all traces."""
        return self.trace_id, self.span_id

    @property
    def duration_ns(self) -> int:
        """Return the duration, at least 0."""
        return max(0, self.end_ns - self.start_ns)

    def text(self, key: str) -> str:
        """Return the attribute, if it is a string; else empty."""
        return _text(self.attributes, key)

    def integer(self, key: str) -> int:
        """Return the attribute, if it is a number of at least 0; else 0."""
        return _integer(self.attributes, key)

    def known(self, key: str) -> int | None:
        """Return the attribute, if it is a number of at least 0; else None."""
        value = self.attributes.get(key)
        return value if _is_count(value) else None

    def share(self, key: str) -> float:
        """Return the attribute, if it is a number in [0, 1]; else 0."""
        value = self.attributes.get(key)
        return float(value) if isinstance(value, (int, float)) and 0 <= value <= 1 else 0.0

    def integers(self, key: str) -> tuple[int, ...]:
        """Return the numbers of at least 0 in the attribute, if it is a list; else none."""
        values = self.attributes.get(key)
        if not isinstance(values, tuple):
            return ()
        return tuple(value for value in values if _is_count(value))

    @property
    def is_request(self) -> bool:
        """Return True if it is a request to one of our gateways."""
        return self.attributes.get(names.PROVIDER) == names.GALLEY and names.OPERATION in self.attributes

    def texts(self, key: str) -> tuple[str, ...]:
        """Return the attribute as strings, if it is a list; else none."""
        values = self.attributes.get(key)
        return tuple(str(value) for value in values) if isinstance(values, tuple) else ()


def _text(attributes: Attributes, key: str) -> str:
    value = attributes.get(key)
    return value if isinstance(value, str) else ""


def _integer(attributes: Attributes, key: str) -> int:
    value = attributes.get(key)
    return value if _is_count(value) else 0


def _is_count(value: Value) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
