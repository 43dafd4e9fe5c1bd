"""The services whose metrics are scraped, and their addresses."""

from __future__ import annotations

from dataclasses import dataclass

_MOST_PORT = 65535


@dataclass(frozen=True, slots=True)
class Service:
    """A process that exports metrics at `metrics` (host:port); `address` is where it serves, if known."""

    name: str
    metrics: str
    address: str = ""


def host_and_port(address: str) -> tuple[str, int]:
    """Split "host:port" or "[ipv6]:port". Raises ValueError if it is neither."""
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    digits = port.isascii() and port.isdigit() and len(port) <= len(str(_MOST_PORT))
    if not host or (":" in host) != bracketed or not digits or not 1 <= int(port) <= _MOST_PORT:
        raise ValueError(f"must be host:port, got {address!r}")
    return host[1:-1] if bracketed else host, int(port)


def named_by_address(addresses: str) -> tuple[Service, ...]:
    """Return services at comma-separated addresses. Raises ValueError for a bad address or none."""
    unique = dict.fromkeys(address.strip() for address in addresses.split(",") if address.strip())
    for address in unique:
        host_and_port(address)
    if not unique:
        raise ValueError("must name at least one address")
    return tuple(Service(address, address) for address in unique)
