"""Several gRPC servers on one port, so that a burst of calls of one connection keeps few others waiting.

A server of gRPC for asyncio accepts the calls of one method one after another, each in several turns of the
event loop, whoever makes them (docs/decisions/077).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from socket import SO_REUSEADDR, SO_REUSEPORT, socket
from typing import Any

import grpc

from galley.common.sockets import CannotBind, bind_socket, host_and_port

ACCEPTORS = 8 if sys.platform == "linux" else 1
"""Other systems do not divide the connections to a port that is shared."""


class Acceptors(grpc.aio.Server):
    """Servers in the running event loop, among which the kernel divides the connections to their port.

    The port is theirs from `listen` on; until `start`, connections to it are refused.
    """

    def __init__(
        self, interceptors: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, int]]
    ) -> None:
        sharing = [("grpc.so_reuseport", 1), *options]
        self._servers = [
            grpc.aio.server(interceptors=interceptors, options=sharing) for _ in range(ACCEPTORS)
        ]
        self._address = ""
        self._credentials: list[grpc.ServerCredentials | None] = []
        self._held: socket | None = None

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
        """Take credentials that servers can share; those that watch their files cannot (`listen`)."""
        return self.listen(address, lambda: server_credentials)

    def listen(self, address: str, credentials: Callable[[], grpc.ServerCredentials | None]) -> int:
        """Take the port, with new credentials for each server, or for calls in plain text; return it.

        The system chooses one if that of the address is 0. Raise CannotBind if it is in use.
        """
        host, _, port = address.rpartition(":")
        self._credentials = [credentials() for _ in self._servers]
        if port != "0":
            _check_unused(address)
        self._held = bind_socket(host.strip("[]"), int(port), (SO_REUSEADDR, SO_REUSEPORT))
        number = int(self._held.getsockname()[1])
        self._address = f"{host}:{number}"
        return number

    async def start(self) -> None:
        """Accept connections and calls. Raise CannotBind if another process has begun to listen."""
        _check_unused(self._address)
        for server, own in zip(self._servers, self._credentials, strict=True):
            try:
                if own is None:
                    server.add_insecure_port(self._address)
                else:
                    server.add_secure_port(self._address, own)
            except RuntimeError as error:
                raise CannotBind(f"cannot listen on {self._address}") from error
            await server.start()
        self._let_go()

    def _let_go(self) -> None:
        if self._held is not None:
            self._held.close()

    async def stop(self, grace: float | None) -> None:
        self._let_go()
        await asyncio.gather(*(server.stop(grace) for server in self._servers))

    async def wait_for_termination(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109  # gRPC's name
        late = await asyncio.gather(*(server.wait_for_termination(timeout) for server in self._servers))
        return any(late)


def _check_unused(address: str) -> None:
    """Raise CannotBind if another process listens, which would get a part of the calls."""
    bind_socket(*host_and_port(address)).close()
