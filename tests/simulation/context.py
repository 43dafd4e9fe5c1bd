"""The context of a simulated call: the parts of `grpc.aio.ServicerContext` that servicers use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import grpc


def error_of(
    code: grpc.StatusCode, details: str, trailing: Iterable[tuple[str, Any]] = ()
) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details=details)


class SimContext:
    """The context of one call. `finish` sends a status unless one was sent, and returns True if it did."""

    def __init__(self, metadata: tuple[tuple[str, str], ...], timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        self.finish: Callable[[BaseException], bool] = lambda _: False
        self.told: Callable[[grpc.StatusCode, str], None] = lambda _, __: None
        self._metadata = metadata
        self._until_s = None if timeout_s is None else loop.time() + timeout_s
        self._callbacks: list[Callable[[object], None]] = []

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def time_remaining(self) -> float | None:
        if self._until_s is None:
            return None
        return max(0.0, self._until_s - asyncio.get_running_loop().time())

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        """Called when the handler has ended, whichever way."""
        self._callbacks.append(callback)

    def ended(self, _handler: object) -> None:
        for callback in self._callbacks:
            callback(self)

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Iterable[tuple[str, Any]] = ()
    ) -> NoReturn:
        """End the call with this status; raises UsageError where it has one already."""
        cancelled = code is grpc.StatusCode.CANCELLED  # as a client is told of it
        end = asyncio.CancelledError() if cancelled else error_of(code, details, trailing_metadata)
        if not self.finish(end):
            raise grpc.aio.UsageError("the call has ended already")
        self.told(code, details)
        raise grpc.aio.AbortError
