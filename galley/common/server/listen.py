"""A server's address: where it listens, and with which credentials."""

from __future__ import annotations

import grpc


class CannotBind(Exception):
    """The address cannot be listened on."""


def bind(
    server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None = None
) -> str:
    """Listen there; the address, host:port, with the port that the system chose for 0. Raises CannotBind."""
    shown = f"[{host}]" if ":" in host else host
    try:
        bound = _add_port(server, f"{shown}:{port}", credentials)
    except RuntimeError as error:
        raise CannotBind(f"cannot listen on {shown}:{port}; is it in use?") from error
    if bound == 0:
        raise CannotBind(f"cannot listen on {shown}:{port}; is it in use?")
    return f"{shown}:{bound}"


def _add_port(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    if credentials is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, credentials)
