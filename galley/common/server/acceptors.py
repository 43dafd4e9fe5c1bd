"""Several gRPC servers on one port, so that a burst of calls of one connection keeps few others waiting.

A server of gRPC for asyncio accepts the calls of one method one after another, each in several turns of the
event loop, whoever makes them (docs/decisions/077).
"""

from __future__ import annotations

import asyncio
import errno
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import grpc

from galley.common.sockets import CannotBind, bind_socket

ACCEPTORS = 8 if sys.platform == "linux" else 1
"""Other systems do not divide the connections to a port that is shared."""


class Acceptors(grpc.aio.Server):
    """Servers in the running event loop, among which the kernel divides the connections to their port."""

    def __init__(
        self, interceptors: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, int]]
    ) -> None:
        sharing = [("grpc.so_reuseport", int(ACCEPTORS > 1)), *options]
        self._servers = [
            grpc.aio.server(interceptors=interceptors, options=sharing) for _ in range(ACCEPTORS)
        ]

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        handlers = list(generic_rpc_handlers)
        for server in self._servers:
            server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        for server in self._servers:
            server.add_registered_method_handlers(service_name, method_handlers)

    def add_insecure_port(self, address: str) -> int:
        return self.listen(address, lambda: None)

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        """Listen with credentials that servers can share; those that watch their files cannot (`listen`)."""
        return self.listen(address, lambda: server_credentials)

    def listen(self, address: str, credentials: Callable[[], grpc.ServerCredentials | None]) -> int:
        """Listen with new credentials for each server, or without any; return the port.

        The system chooses one for all servers if that of the address is 0. Raise CannotBind if it is in use.
        """
        host, _, port = address.rpartition(":")
        made = [credentials() for _ in self._servers]
        if port != "0":
            _check_unused(host.strip("[]"), int(port))
        for server, own in zip(self._servers, made, strict=True):
            here = f"{host}:{port}"
            port = str(server.add_insecure_port(here) if own is None else server.add_secure_port(here, own))
        return int(port)

    async def start(self) -> None:
        for server in self._servers:
            await server.start()

    async def stop(self, grace: float | None) -> None:
        await asyncio.gather(*(server.stop(grace) for server in self._servers))

    async def wait_for_termination(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109  # gRPC's name
        late = await asyncio.gather(*(server.wait_for_termination(timeout) for server in self._servers))
        return any(late)


def _check_unused(host: str, port: int) -> None:
    """Raise CannotBind if another process has the port, which would get a part of the calls."""
    try:
        bind_socket(host, port).close()
    except CannotBind as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE:
            raise
