"""The rules of the registry of replicas, as `services.common.registry` keeps them in its scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.common.registry import Replaced

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.core.routing import ReplicaLease


class Leases:
    """Who is registered. A life that another has come after is refused, whatever became of that one since."""

    def __init__(self, lease_s: float, clock: Callable[[], float]) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._held: dict[tuple[str, str], tuple[ReplicaLease, float]] = {}
        self._lives: dict[tuple[str, str], list[str]] = {}

    def publish(self, pool: str, lease: ReplicaLease) -> None:
        """Raises Replaced."""
        lives = self._lives.setdefault((pool, lease.address), [])
        if lease.incarnation in lives[:-1]:
            raise Replaced(lease.address)
        if lease.incarnation not in lives:
            lives.append(lease.incarnation)
        self._held[pool, lease.address] = lease, self._clock() + self._lease_s

    def knows(self, pool: str, lease: ReplicaLease) -> bool:
        """Whether this life has ever been registered."""
        return lease.incarnation in self._lives.get((pool, lease.address), ())

    def withdraw(self, pool: str, address: str, incarnation: str) -> None:
        """Of that life alone."""
        held = self._held.get((pool, address))
        if held is not None and held[0].incarnation == incarnation:
            del self._held[pool, address]

    def read(self, pool: str) -> list[ReplicaLease]:
        """By address."""
        now_s = self._clock()
        return [
            lease
            for (of, _), (lease, expires_s) in sorted(self._held.items(), key=lambda item: item[0])
            if of == pool and expires_s > now_s
        ]

    def clear(self) -> None:
        """All is lost."""
        self._held.clear()
        self._lives.clear()
