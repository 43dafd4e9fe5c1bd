"""gRPC channels over the simulated network: stubs of clients and gateways call the servicers behind them.

As in grpc.aio, an exception of a servicer ends the call with its status, cancelling a call or passing its
deadline cancels its handler, and a process that dies breaks its calls. A response of a server stream waits
for room in the transport, and the status waits for all responses before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.message_factory import GetMessageClass

from tests.simulation.system.call import Call, Kind, Server, SimContext, error_of
from tests.simulation.system.loop import Process
from tests.simulation.system.network import Network


class SimChannel:
    """The parts of `grpc.aio.Channel` that stubs use; `metadata` is sent with every call."""

    def __init__(
        self,
        network: Network,
        servers: Mapping[str, Server],
        client: Process,
        address: str,
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self._network = network
        self._servers = servers
        self._client = client
        self._address = address
        self._metadata = metadata

    def unary_unary(self, method: str, **_serialization: object) -> Any:
        async def call(
            request: object,
            timeout: float | None = None,  # noqa: ASYNC109  # the shape that grpc has
            metadata: tuple[tuple[str, str], ...] | None = None,
            *,
            wait_for_ready: bool = False,
        ) -> object:
            made = self._call(method, Kind.UNARY, timeout, metadata or ())
            made.begin()
            try:
                async with asyncio.timeout(timeout):
                    await made.write(request)
                    response = await anext(made)
                    made.cancel()
                    return response
            except TimeoutError:
                made.cancel()
                raise error_of(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None

        return call

    def unary_stream(self, method: str, **_serialization: object) -> Any:
        return self._stream(method, Kind.STREAM)

    def stream_unary(self, method: str, **_serialization: object) -> Any:
        """Return no call: no gateway makes one of this kind."""

    def http(self, method: str) -> Any:
        """Return a call by HTTP; what is sent and read are messages of ASGI."""
        return self._stream(method, Kind.HTTP)

    def _stream(self, method: str, kind: Kind) -> Any:
        def call(
            request: object,
            timeout: float | None = None,
            metadata: tuple[tuple[str, str], ...] | None = None,
        ) -> Call:
            made = self._call(method, kind, timeout, metadata or ())
            made.begin()
            made.send_request(request)
            if timeout is not None:
                asyncio.get_running_loop().call_later(max(0.0, timeout), made.expire)
            return made

        return call

    def stream_stream(self, method: str, *_: object, **_serialization: object) -> Any:
        """Return what opens a call whose requests are bytes, as gateways send them."""
        service, name = method.strip("/").split("/")
        found = descriptor_pool.Default().FindMethodByName(f"{service}.{name}")
        parse = GetMessageClass(found.input_type).FromString

        def call() -> Call:
            made: Any = self._call(method, Kind.BOTH, None)
            write = made.write
            made.write = lambda request: write(parse(request))
            made.begin()
            return cast("Call", made)

        return call

    def _call(
        self, method: str, kind: Kind, timeout_s: float | None, more: tuple[tuple[str, str], ...] = ()
    ) -> Call:
        name = method.rpartition("/")[2]
        context = SimContext(self._metadata + more, timeout_s)
        return Call(self._network, self._servers, self._client, self._address, name, kind, context)

    async def close(self, _grace: float | None = None) -> None:
        """Do nothing: the channel holds no connection."""
