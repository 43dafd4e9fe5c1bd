"""Addresses and sockets of IPv4, IPv6 or both. Clients import this: standard library only."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from socket import AF_INET, AF_INET6, IPPROTO_IPV6, IPV6_V6ONLY, SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET, socket

ANY = "::"
"""Every address of the machine, of IPv4 and of IPv6; those of IPv4 if the kernel has no IPv6."""
_MAX_PORT = 65535


class CannotBind(OSError): ...


def bind_socket(host: str, port: int, options: Collection[int] = (SO_REUSEADDR,)) -> socket:
    """Return a socket that listens once it is served; port 0 lets the system choose. Raise CannotBind.

    The socket `options` are switched on.
    """
    try:
        bound = _socket_for(host)
    except OSError as error:
        raise CannotBind(f"cannot listen on {joined(host, port)}: {error.strerror}") from error
    try:
        for option in options:
            bound.setsockopt(SOL_SOCKET, option, 1)
        bound.bind((host if bound.family == AF_INET6 or host != ANY else "", port))
    except OSError as error:
        bound.close()
        raise CannotBind(f"cannot listen on {joined(host, port)}; is it in use?") from error
    return bound


def _socket_for(host: str) -> socket:
    if ":" not in host:
        return socket(AF_INET, SOCK_STREAM)
    try:
        bound = socket(AF_INET6, SOCK_STREAM)
    except OSError:
        if host != ANY:
            raise
        return socket(AF_INET, SOCK_STREAM)
    bound.setsockopt(IPPROTO_IPV6, IPV6_V6ONLY, host != ANY)
    return bound


def socket_address(bound: socket) -> str:
    """Return host:port of a bound socket."""
    return joined(*bound.getsockname()[:2])


def joined(host: str, port: int) -> str:
    """Return "host:port", with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_and_port(text: str, default_port: int | None = None) -> tuple[str, int]:
    """Split "host:port" or "[ipv6]:port"; with a default port, also "host" and "ipv6". Raises ValueError."""
    if "@" in text:  # not printed: it may hold a password
        raise ValueError("must be host:port without a user name or password")
    if default_port is not None and _is_ipv6(text.strip("[]")):
        return text.strip("[]"), default_port
    host, colon, port = text.rpartition(":")
    if default_port is not None and not colon:
        host, port = text, str(default_port)
    is_bracketed = host.startswith("[") and host.endswith("]") and _is_ipv6(host[1:-1])
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= _MAX_PORT
    if not host or not is_port or (not is_bracketed and re.search(r"[\s/@:\[\]]", host)):
        raise ValueError(f"must be host:port with a port from 1 to {_MAX_PORT}, got {text!r}")
    return host[1:-1] if is_bracketed else host, int(port)


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False
