"""An HTTP request as the session path sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import grpc
from opentelemetry.util.types import AnyValue

from galley.core.errors import InvalidField

TIMEOUT_HEADER = "x-galley-timeout-s"
_LONGEST_TIMEOUT_S = 86_400.0

Headers = Sequence[tuple[str, str]]


class HttpCall:
    """One request, as a `ClientCall`. `hang_up` ends its connection at once."""

    def __init__(self, headers: Headers, hang_up: Callable[[], None], until_s: float | None = None) -> None:
        """Take headers with lower-case names; `until_s` is the deadline in the time of the event loop."""
        self._headers = headers
        self._hang_up = hang_up
        self.span_attributes: dict[str, AnyValue] = {}
        self._until_s = until_s
        self._callbacks: list[Callable[[Any], None]] = []

    def invocation_metadata(self) -> Headers:
        return self._headers

    def time_remaining(self) -> float | None:
        if self._until_s is None:
            return None
        return max(0.0, self._until_s - asyncio.get_running_loop().time())

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Iterable[tuple[str, Any]] = ()
    ) -> NoReturn:
        """End the connection: the status was sent already, and the client reads nothing."""
        del code, details, trailing_metadata
        self._hang_up()
        raise grpc.aio.AbortError

    def beside(self, traceparent: str) -> HttpCall:
        """Return a call for another choice of this request, whose span is below `traceparent` if given."""
        headers = [
            (name, value) for name, value in self._headers if not (traceparent and name == "traceparent")
        ]
        if traceparent:
            headers.append(("traceparent", traceparent))
        call = HttpCall(headers, self._hang_up, self._until_s)
        call.span_attributes = self.span_attributes
        return call

    def ended(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)


def header(headers: Headers, name: str) -> str:
    """Return the last value of a header; empty if it is missing."""
    return next((value for key, value in reversed(headers) if key == name), "")


def deadline_of(headers: Headers) -> float | None:
    """Return the deadline that a request asks for, in the time of the event loop. Raise InvalidField."""
    text = header(headers, TIMEOUT_HEADER)
    if not text:
        return None
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = 0.0
    if not 0 < timeout_s <= _LONGEST_TIMEOUT_S:
        raise InvalidField(
            TIMEOUT_HEADER, f"must be a number of seconds in (0, {_LONGEST_TIMEOUT_S:g}], got {text[:32]!r}"
        )
    return asyncio.get_running_loop().time() + timeout_s
