"""A call of a client, as the session path sees it: `grpc.aio.ServicerContext` has these methods, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn, Protocol, cast

import grpc

from galley.common.wire.handlers import HasMetadata


class ClientCall(HasMetadata, Protocol):
    """One call of a client, by gRPC or HTTP."""

    def time_remaining(self) -> float | None:
        """Return the seconds until the call's deadline; None if it has none."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call `callback(call)` once the call has ended, also if its handler is never resumed."""

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Iterable[tuple[str, Any]] = ()
    ) -> NoReturn:
        """End the call with an error, also if its client reads nothing. Raise grpc.aio.AbortError."""


def client_call(context: grpc.aio.ServicerContext[Any, Any]) -> ClientCall:
    """Return the context as what it is: its stubs ask for more of a callback than gRPC does."""
    return cast("ClientCall", context)


def once(callback: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a function that calls `callback` the first time, and forgets it.

    gRPC keeps the callbacks of an ended call in a reference cycle. What they hold, such as a whole session,
    would wait for a garbage collection.
    """
    waiting = [callback]

    def call_once(call: object) -> None:
        while waiting:
            waiting.pop()(call)

    return call_once
