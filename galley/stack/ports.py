"""Ports of this machine: the ones that a stack uses if none is named."""

from __future__ import annotations

import contextlib
import socket
from typing import Self

from galley.client.addresses import DEFAULT_PORT

GRPC_PORT, HTTP_PORT = DEFAULT_PORT, 8000
LOOPBACK = "127.0.0.1"
_MAX_PORT = 65535


class ReservedPorts:
    """Ports that no other stack of this machine chooses until the end of `with`.

    A gateway opens its port long after the stack chose it. Until then a name in the abstract namespace of
    Unix sockets (unix(7)) stands for the port: it belongs to the same network namespace, and ends with the
    processes that hold it.
    """

    def __init__(self) -> None:
        self._names = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._names.close()

    def take(self, port: int) -> None:
        """Reserve a port. Raise OSError if a stack has reserved it, or no server can listen there."""
        with contextlib.ExitStack() as opened:
            opened.enter_context(socket.socket(socket.AF_UNIX)).bind(f"\0galley-port-{port}")
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
                probe.bind((LOOPBACK, port))
            self._names.push(opened.pop_all())

    def take_next(self, first: int) -> int:
        """Reserve the first free port from `first` on, and return it. Raise OSError if none is."""
        for port in range(first, _MAX_PORT + 1):
            with contextlib.suppress(OSError):
                self.take(port)
                return port
        raise OSError(f"no port from {first} on is free")


def free_ports(count: int) -> list[int]:
    """Return different ports that are free at this moment."""
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((LOOPBACK, 0))
        return [one.getsockname()[1] for one in sockets]
