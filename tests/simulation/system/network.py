"""A network between named nodes: delays, partitions, frozen nodes, and connections that break.

Messages on one connection arrive in order, as over TCP; those on different connections may overtake each
other. A message sent into a partition arrives when it heals, unless the connection is given up before.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from zlib import crc32

from tests.simulation.system.loop import Process

KEEPALIVE_S = 1.5
"""Time of a partition after which its connections are given up."""

_MEAN_DELAY_S = 0.002
_TICK_S = 1e-6


class Connection:
    """A connection, which breaks when either end dies, or the network between them is down for long."""

    def __init__(self, network: Network, near: Process, far: str) -> None:
        self.near = near
        self.far = far
        self.server: Process | None = None
        self._network = network
        self._last_s = {True: 0.0, False: 0.0}
        self.broken = False
        network.connections[id(self)] = self

    def send(self, deliver: Callable[[], None], *, forth: bool) -> None:
        sender = self.near if forth else self.server
        if self.broken or sender is None or not sender.alive:
            return
        ends = (self.near.name, self.far) if forth else (self.far, self.near.name)
        at_s = max(self._network.arrival_s(*ends), self._last_s[forth] + _TICK_S)
        self._last_s[forth] = at_s
        asyncio.get_running_loop().call_at(at_s, self._deliver, deliver, forth)

    def _deliver(self, deliver: Callable[[], None], forth: bool) -> None:
        receiver = self.server if forth else self.near
        if not self.broken and (receiver is None or receiver.alive):
            deliver()

    def give_up(self, reason: str) -> None:
        if not self.broken:
            self.close()
            self.broke(reason)

    def close(self) -> None:
        self.broken = True
        self._network.connections.pop(id(self), None)

    def broke(self, reason: str) -> None:
        """Notify both ends, each as soon as it can be reached."""


class Network:
    """All links; each draws its random delays from a generator of its own."""

    def __init__(self, seed: int) -> None:
        self.connections: dict[int, Connection] = {}
        self._seed = seed
        self._links: dict[tuple[str, str], random.Random] = {}
        self._cut_until: dict[frozenset[str], float] = {}
        self._frozen_until: dict[str, float] = {}
        self._slow: dict[str, float] = {}

    def arrival_s(self, sender: str, receiver: str) -> float:
        """Return when a message sent now arrives."""
        at_s = max(asyncio.get_running_loop().time(), self._frozen_until.get(sender, 0.0))
        at_s = max(at_s, self._cut_until.get(frozenset((sender, receiver)), 0.0))
        at_s += self._delay_s(sender, receiver)
        return max(at_s, self._frozen_until.get(receiver, 0.0))

    def link(self, sender: str, receiver: str) -> random.Random:
        key = (sender, receiver)
        if key not in self._links:
            self._links[key] = random.Random(crc32(f"{self._seed} {sender} {receiver}".encode()))
        return self._links[key]

    def _delay_s(self, sender: str, receiver: str) -> float:
        slow = max(self._slow.get(sender, 1.0), self._slow.get(receiver, 1.0))
        return (0.0002 + self.link(sender, receiver).expovariate(1.0 / _MEAN_DELAY_S)) * slow

    def cut(self, one: str, other: str, for_s: float) -> None:
        loop = asyncio.get_running_loop()
        ends = frozenset((one, other))
        self._cut_until[ends] = max(self._cut_until.get(ends, 0.0), loop.time() + for_s)
        if for_s > KEEPALIVE_S:
            loop.call_later(KEEPALIVE_S, self.break_between, one, other, "keepalive ping timed out")

    def freeze(self, node: str, for_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._frozen_until[node] = max(self._frozen_until.get(node, 0.0), loop.time() + for_s)
        if for_s > KEEPALIVE_S:
            loop.call_later(KEEPALIVE_S, self.break_all, node, "keepalive ping timed out")

    def slow(self, node: str, factor: float) -> None:
        self._slow[node] = factor

    def break_between(self, one: str, other: str, reason: str) -> None:
        for connection in list(self.connections.values()):
            if {connection.near.name, connection.far} == {one, other}:
                connection.give_up(reason)

    def break_dead(self, node: str) -> None:
        """End the connections of dead processes of a node, which answer no pings."""
        for connection in list(self.connections.values()):
            ends = (connection.near, connection.server)
            if any(it is not None and it.name == node and not it.alive for it in ends):
                connection.give_up("keepalive ping timed out")

    def break_all(self, node: str, reason: str) -> None:
        for connection in list(self.connections.values()):
            if node in {connection.near.name, connection.far}:
                connection.give_up(reason)
