"""Addresses of gateways, as people type them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import NamedTuple

DEFAULT_PORT = 50051
_MAX_PORT = 65535
# gRPC's own forms (unix:, dns:, ipv4:, ...) are taken as they are.
_GRPC_TARGET = re.compile(r"(unix|unix-abstract|dns|ipv4|ipv6|vsock|xds):")
_URL = re.compile(r"(?P<scheme>https?|grpcs?)://(?P<rest>[^/?#]*)/?")


class Addresses(NamedTuple):
    """Addresses as gRPC takes them; `tls` is True, for all of them, if any had https:// or grpcs://."""

    hosts: tuple[str, ...]
    tls: bool


def parse_addresses(addresses: str | Sequence[str]) -> Addresses:
    """Read "host:port", "host", "::1", "[::1]:port", URLs such as "https://host:port", or gRPC's own forms.

    Text may hold several with commas. The default port is 50051. Raises ValueError.
    """
    given = addresses.split(",") if isinstance(addresses, str) else addresses
    parsed = [_parse(address.strip()) for address in given if address.strip()]
    if not parsed:
        raise ValueError("must name at least one gateway, HOST:PORT")
    return Addresses(tuple(dict.fromkeys(host for host, _ in parsed)), any(tls for _, tls in parsed))


def _parse(address: str) -> tuple[str, bool]:
    if _GRPC_TARGET.match(address):
        return address, False
    if "@" in address:  # not printed: it may hold a password
        raise ValueError("must be HOST[:PORT] without a user name or password")
    url = _URL.fullmatch(address)
    tls = url is not None and url["scheme"] in {"https", "grpcs"}
    try:
        host, port = host_and_port(url["rest"] if url else address, DEFAULT_PORT)
    except ValueError:
        raise ValueError(f"must be HOST[:PORT], got {address!r}") from None
    return joined(host, port), tls


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
