"""A model of the replica registry, with the rules of `galley.common.registry.leases` and its scripts."""

from __future__ import annotations

from collections.abc import Callable

from galley.common.registry.leases import Replaced
from galley.core.routing.choice import ReplicaLease


class Leases:
    """The registered replicas. An incarnation that a later one has replaced is refused for good."""

    def __init__(self, lease_s: float, clock: Callable[[], float]) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._held: dict[tuple[str, str], tuple[ReplicaLease, float]] = {}
        self._latest: dict[tuple[str, str], int] = {}
        self._births = 0

    def bear(self) -> int:
        """When a life that asks now is born: after all that have asked before."""
        self._births += 1
        return self._births

    def publish(self, pool: str, lease: ReplicaLease, born: int) -> None:
        if born < self._latest.get((pool, lease.address), 0):
            raise Replaced(lease.address)
        self._latest[pool, lease.address] = born
        self._held[pool, lease.address] = lease, self._clock() + self._lease_s

    def withdraw(self, pool: str, address: str, incarnation: str) -> None:
        held = self._held.get((pool, address))
        if held is not None and held[0].incarnation == incarnation:
            del self._held[pool, address]

    def read(self, pool: str) -> list[ReplicaLease]:
        now_s = self._clock()
        return [
            lease
            for (of, _), (lease, expires_s) in sorted(self._held.items(), key=lambda item: item[0])
            if of == pool and expires_s > now_s
        ]

    def clear(self) -> None:
        self._held.clear()
        self._latest.clear()
