"""Addresses of gateways, as people type them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from galley.common.sockets import host_and_port, joined

DEFAULT_PORT = 50051
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
