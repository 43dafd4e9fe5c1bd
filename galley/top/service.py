"""The services whose metrics are scraped."""

from __future__ import annotations

from dataclasses import dataclass

from galley.client.addresses import host_and_port


@dataclass(frozen=True, slots=True)
class Service:
    """A process that exports metrics at `metrics` (host:port); `address` is where it serves, if known."""

    name: str
    metrics: str
    address: str = ""


def named_by_address(addresses: str) -> tuple[Service, ...]:
    """Return services at comma-separated addresses. Raises ValueError for a bad address or none."""
    unique = dict.fromkeys(address.strip() for address in addresses.split(",") if address.strip())
    for address in unique:
        host_and_port(address)
    if not unique:
        raise ValueError("must name at least one address")
    return tuple(Service(address, address) for address in unique)
