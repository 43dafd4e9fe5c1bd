"""gRPC channels over the simulated network: the stubs of the gateway call the servicers of the replicas.

As grpc.aio does it: what a servicer raises ends the call with its status, a call that is cancelled cancels
its handler, a process that dies breaks the calls that it had.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

import grpc

from services.common.status import code_of, message_of
from tests.simulation.network import Connection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from tests.simulation.loop import Process
    from tests.simulation.network import Network

_REFUSED = "failed to connect to all addresses"


class Server:
    """What serves at an address now: a process and its servicer."""

    def __init__(self, process: Process, servicer: Any) -> None:
        self.process = process
        self.servicer = servicer


def _error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


class SimChannel:
    """A `grpc.aio.Channel` as far as the stubs use one."""

    def __init__(
        self, network: Network, servers: Mapping[str, Server], client: Process, address: str
    ) -> None:
        self._network = network
        self._servers = servers
        self._client = client
        self._address = address

    def unary_unary(self, method: str, **_serialization: object) -> Any:
        """A multi-callable of a method with one response."""

        async def call(
            request: object,
            timeout: float | None = None,  # noqa: ASYNC109  # the shape that grpc has
            *,
            wait_for_ready: bool = False,
        ) -> object:
            made = self._call(method)
            made.begin()
            try:
                async with asyncio.timeout(timeout):
                    await made.write(request)
                    response = await anext(made)
                    made.cancel()  # nothing further is read
                    return response
            except TimeoutError:
                made.cancel()
                raise _error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None

        return call

    def stream_stream(self, method: str, **_serialization: object) -> Any:
        """A multi-callable of a method with streams both ways."""

        def call() -> Call:
            made = self._call(method)
            made.begin()
            return made

        return call

    def _call(self, method: str) -> Call:
        return Call(self._network, self._servers, self._client, self._address, method.rpartition("/")[2])

    async def close(self, _grace: float | None) -> None:
        """Nothing is held."""


class Call(Connection):
    """One call on a connection of its own, from both ends."""

    def __init__(
        self,
        network: Network,
        servers: Mapping[str, Server],
        client: Process,
        address: str,
        method: str,
    ) -> None:
        super().__init__(network, client, address)
        self._servers = servers
        self._method = method
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self._responses: deque[Any] = deque()
        self._there = asyncio.Event()
        self._end: BaseException | None = None
        self._handler: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------------- the near end --

    def begin(self) -> None:
        """Ask for it."""
        self.send(self._accept, forth=True)

    async def write(self, request: object) -> None:
        """Raises asyncio.InvalidStateError once the call is over."""
        if self._end is not None:
            raise asyncio.InvalidStateError("the call is over")
        self.send(lambda: self._requests.put_nowait(request), forth=True)

    def cancel(self) -> bool:
        """End it; the far end is told."""
        if self._end is not None:
            return False
        self.send(self._cancel_handler, forth=True)
        self._end_with(asyncio.CancelledError())
        return True

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> Any:
        while not self._responses:
            if self._end is not None:
                raise self._end
            self._there.clear()
            await self._there.wait()
        return self._responses.popleft()

    def _take(self, response: object) -> None:
        if self._end is None:
            self._responses.append(response)
            self._there.set()

    def _end_with(self, end: BaseException) -> None:
        if self._end is None:
            self._end = end
            self._there.set()

    def broke(self, reason: str) -> None:
        """Each end learns of it by itself."""
        self._end_with(_error(grpc.StatusCode.UNAVAILABLE, reason))
        self._cancel_handler()

    # -------------------------------------------------------------------------- the far end --

    def _accept(self) -> None:
        server = self._servers.get(self.far)
        if server is None or not server.process.alive:
            self.give_up(_REFUSED)
            return
        self.server = server.process
        self._handler = server.process.spawn(self._handle(server.servicer))

    def _cancel_handler(self) -> None:
        if self._handler is not None:
            self._handler.cancel()

    async def _handle(self, servicer: Any) -> None:
        try:
            if self._method.endswith("Stream"):
                responses = getattr(servicer, self._method)(self._iterate(), None)
                try:
                    async for response in responses:
                        self._respond(response)
                finally:
                    await responses.aclose()
            else:
                self._respond(await getattr(servicer, self._method)(await self._requests.get(), None))
            end: BaseException = StopAsyncIteration()
        except asyncio.CancelledError:
            if self.server is not None and self.server.alive:  # given up by the near end; else nobody is told
                self.close()
            raise
        except Exception as error:  # noqa: BLE001  # the outermost guard of a call
            end = _error(code_of(error), message_of(error))
        self.send(lambda: self._finish(end), forth=False)

    async def _iterate(self) -> AsyncIterator[Any]:
        while True:
            yield await self._requests.get()

    def _respond(self, response: object) -> None:
        self.send(lambda: self._take(response), forth=False)

    def _finish(self, end: BaseException) -> None:
        self._end_with(end)
        self.close()
