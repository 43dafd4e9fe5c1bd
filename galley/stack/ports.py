"""Ports of this machine: the ones that a stack uses if none is named."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Collection

from galley.client.addresses import DEFAULT_PORT

GRPC_PORT, HTTP_PORT = DEFAULT_PORT, 8000
LOOPBACK = "127.0.0.1"
_MAX_PORT = 65535


def port_problem(port: int) -> str:
    """Return why no server can listen on this port of the loopback address; "" if one can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            return str(error.strerror)
    return ""


def next_free_port(first: int, reserved: Collection[int] = ()) -> int:
    """Return the first port from `first` on that is free and not reserved. Raise OSError if none is."""
    for port in range(first, _MAX_PORT + 1):
        if port not in reserved and not port_problem(port):
            return port
    raise OSError(f"no port from {first} on is free")


def free_ports(count: int) -> list[int]:
    """Return different ports that are free at this moment."""
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((LOOPBACK, 0))
        return [one.getsockname()[1] for one in sockets]
