"""Spans of a trace, whatever system wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from galley.core import names

Value: TypeAlias = "str | bool | int | float | tuple[Value, ...] | Mapping[str, Value] | None"
Attributes: TypeAlias = "Mapping[str, Value]"
SpanKey: TypeAlias = tuple[str, str]
"""Trace id and span id, in lower-case hex."""

SERVER, CLIENT = 2, 3
ERROR = 2


class _Attributed:
    """Read untrusted attributes: a value of another type counts as missing."""

    __slots__ = ()
    attributes: Attributes

    def text(self, key: str) -> str:
        value = self.attributes.get(key)
        return value if isinstance(value, str) else ""

    def known(self, key: str) -> int | None:
        """Return an integer; None if missing or negative."""
        value = self.attributes.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None

    def integer(self, key: str) -> int:
        return self.known(key) or 0

    def share(self, key: str) -> float:
        """Return a number in [0, 1]; 0 if missing or outside."""
        value = self.attributes.get(key)
        return float(value) if isinstance(value, (int, float)) and 0 <= value <= 1 else 0.0

    def values(self, key: str) -> tuple[Value, ...]:
        values = self.attributes.get(key)
        return values if isinstance(values, tuple) else ()

    def texts(self, key: str) -> tuple[str, ...]:
        return tuple(str(value) for value in self.values(key))


@dataclass(frozen=True, slots=True)
class Process:
    """The process that wrote a span: its service and `service.instance.id`, a random name."""

    service: str
    instance: str = ""


@dataclass(frozen=True, slots=True)
class Event(_Attributed):
    name: str
    time_ns: int
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Link(_Attributed):
    trace_id: str
    span_id: str
    attributes: Attributes = field(default_factory=dict)

    @property
    def key(self) -> SpanKey:
        return self.trace_id, self.span_id


@dataclass(frozen=True, slots=True)
class Span(_Attributed):
    """One span; times are in nanoseconds since 1970, of the clock of its process."""

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
        return self.trace_id, self.span_id

    @property
    def duration_ns(self) -> int:
        return max(0, self.end_ns - self.start_ns)

    @property
    def is_request(self) -> bool:
        return self.text(names.PROVIDER) == names.GALLEY and names.OPERATION in self.attributes
