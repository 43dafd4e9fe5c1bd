"""Who is asked for metrics, and where."""

from __future__ import annotations

from dataclasses import dataclass

_MOST_PORT = 65535


@dataclass(frozen=True, slots=True)
class Service:
    """A process that tells its metrics at `metrics` (host:port); `address` is where it serves, if known."""

    name: str
    metrics: str
    address: str = ""


def host_and_port(address: str) -> tuple[str, int]:
    """Of "host:port" or "[ipv6]:port"; ValueError if it is neither."""
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    digits = port.isascii() and port.isdigit() and len(port) <= len(str(_MOST_PORT))
    if not host or (":" in host) != bracketed or not digits or not 1 <= int(port) <= _MOST_PORT:
        raise ValueError(f"{address!r} is no host:port")
    return host[1:-1] if bracketed else host, int(port)


def named_by_address(addresses: str) -> tuple[Service, ...]:
    """Services at addresses with commas, each once; ValueError if one is no address, or there is none."""
    told = dict.fromkeys(address.strip() for address in addresses.split(",") if address.strip())
    for address in told:
        host_and_port(address)
    if not told:
        raise ValueError("no address")
    return tuple(Service(address, address) for address in told)
