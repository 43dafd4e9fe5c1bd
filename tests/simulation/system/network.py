"""A network between named nodes: delays, cuts of one or both directions, frozen nodes, broken connections.

Messages on one connection arrive in order, as over TCP; those on different connections may overtake each
other. A message that is sent into a cut arrives when it heals. Each end of a connection finds out by itself
that the other is away; one that gives up says so to the other, after all that it has sent before.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from math import log
from zlib import crc32

from tests.simulation.system.loop import Process, running_loop

_LEAST_DELAY_S = 0.0002
_DELAYS_A_S = 1.0 / 0.002
"""The rest of a delay is exponential, with this rate."""
_TICK_S = 1e-6


class Connection:
    """A connection between two processes, each of which may take it for broken while the other does not."""

    def __init__(self, network: Network, near: Process, far: str) -> None:
        self.near = near
        self.far = far
        self.server: Process | None = None
        self.broken = False
        self._network = network
        self._last_s = {True: 0.0, False: 0.0}
        self._gone = {True: False, False: False}
        network.connections[id(self)] = self

    def send(self, deliver: Callable[[], None], *, forth: bool) -> None:
        sender = self.near if forth else self.server
        if self._gone[forth] or sender is None or not sender.alive:
            return
        network, near, far = self._network, self.near.name, self.far
        at_s = network.arrival_s(near, far) if forth else network.arrival_s(far, near)
        at_s = self._last_s[forth] = max(at_s, self._last_s[forth] + _TICK_S)
        network.loop.call_at(at_s, self._deliver, deliver, forth)

    def _deliver(self, deliver: Callable[[], None], forth: bool) -> None:
        receiver = self.server if forth else self.near
        if not self._gone[not forth] and not self.broken and (receiver is None or receiver.alive):
            deliver()

    def give_up(self, reason: str, *, near: bool, silent: bool = False) -> None:
        """Let one end take the connection for broken; unless `silent`, it tells the other."""
        if self.broken or self._gone[near]:
            return
        if not silent and not near and self.server is None:
            self._network.tell(self.far, self, "connection reset by peer")
        elif not silent:
            self.send(partial(self.give_up, reason, near=not near), forth=near)
        self._gone[near] = True
        if near:
            self.near_broke(reason)
        else:
            self.far_broke()
        if self._gone[not near]:
            self.close()

    def break_both(self, reason: str) -> None:
        self.give_up(reason, near=True, silent=True)
        self.give_up(reason, near=False, silent=True)

    def close(self) -> None:
        self.broken = True
        self._network.connections.pop(id(self), None)

    def near_broke(self, reason: str) -> None:
        """End the call for its client."""

    def far_broke(self) -> None:
        """End the call for its server."""


class Network:
    """All links; each draws its random delays from a generator of its own.

    A client end gives up on a silent peer after `keepalive_s`, a server end after `pings_s`.
    """

    def __init__(self, seed: int, keepalive_s: float, pings_s: float) -> None:
        self.loop = running_loop()
        self.connections: dict[int, Connection] = {}
        self.keepalive_s = keepalive_s
        self.pings_s = pings_s
        self.moves_known_s = 0.0
        """When servers know of all clients that have moved."""
        self._seed = seed
        self._links: dict[tuple[str, str], Callable[[], float]] = {}
        self._cut_until: dict[tuple[str, str], float] = {}
        self._down: dict[frozenset[str], tuple[float, float]] = {}
        self._frozen_until: dict[str, float] = {}
        self._slow: dict[str, float] = {}

    def arrival_s(self, sender: str, receiver: str) -> float:
        """Return when a message sent now arrives."""
        at_s = self.loop.now_s
        if self._frozen_until:
            at_s = max(at_s, self._frozen_until.get(sender, 0.0))
        if self._cut_until:
            at_s = max(at_s, self._cut_until.get((sender, receiver), 0.0))
        draw = self._links.get((sender, receiver)) or self._link(sender, receiver)
        delay_s = _LEAST_DELAY_S - log(1.0 - draw()) / _DELAYS_A_S
        if self._slow:
            delay_s *= max(self._slow.get(sender, 1.0), self._slow.get(receiver, 1.0))
        at_s += delay_s
        return max(at_s, self._frozen_until[receiver]) if receiver in self._frozen_until else at_s

    def is_down(self, one: str, other: str) -> bool:
        """Return True if the ends have given up on each other, and no new connection comes about."""
        from_s, until_s = self._down.get(frozenset((one, other)), (0.0, 0.0))
        return from_s <= asyncio.get_running_loop().time() < until_s

    def draw(self, sender: str, receiver: str) -> float:
        """Return the next random number in [0, 1) of a link."""
        draw = self._links.get((sender, receiver)) or self._link(sender, receiver)
        return draw()

    def _link(self, sender: str, receiver: str) -> Callable[[], float]:
        seed = crc32(f"{self._seed} {sender} {receiver}".encode())
        draw = self._links[sender, receiver] = random.Random(seed).random
        return draw

    def cut(self, one: str, other: str, for_s: float) -> None:
        self.cut_one_way(one, other, for_s)
        self.cut_one_way(other, one, for_s)

    def cut_one_way(self, sender: str, receiver: str, for_s: float) -> None:
        """Hold back what one node sends to another; neither gets the other's replies to its pings."""
        now_s, ends = asyncio.get_running_loop().time(), (sender, receiver)
        self._cut_until[ends] = max(self._cut_until.get(ends, 0.0), now_s + for_s)
        if for_s > self.keepalive_s:
            self._down[frozenset(ends)] = now_s + self.keepalive_s, now_s + for_s
        self._ping(for_s, lambda it: {it.near.name, it.far} == {sender, receiver}, (True, False))

    def freeze(self, node: str, for_s: float) -> None:
        until_s = asyncio.get_running_loop().time() + for_s
        self._frozen_until[node] = max(self._frozen_until.get(node, 0.0), until_s)
        self._ping(for_s, lambda it: it.far == node, (True,))
        self._ping(for_s, lambda it: it.near.name == node, (False,))

    def slow(self, node: str, factor: float) -> None:
        self._slow[node] = factor

    def reset(self, one: str, other: str) -> None:
        for it in self._of(lambda it: {it.near.name, it.far} == {one, other}):
            it.break_both("connection reset by peer")

    def die(self, node: str, *, silent: bool) -> None:
        """Break the connections of a process that has died; a machine that has vanished resets none."""
        for it in self._of(lambda it: node in {it.near.name, it.far}):
            near = it.far == node
            if silent:
                wait_s = self.keepalive_s if near else self.pings_s
                self._give_up_after(wait_s, it, near, "keepalive ping timed out")
            else:
                self.tell(node, it, "connection reset by peer")

    def tell(self, node: str, it: Connection, reason: str) -> None:
        """Reset a connection of a node that has no process for it (any more)."""
        near = it.far == node
        at_s = self.arrival_s(node, it.near.name if near else it.far)
        asyncio.get_running_loop().call_at(at_s, partial(it.give_up, reason, near=near))

    def move(self, client: str) -> None:
        """Give a client another address: its connections are broken, which servers find out by pings."""
        self.moves_known_s = asyncio.get_running_loop().time() + self.pings_s
        for it in self._of(lambda it: it.near.name == client):
            it.give_up("the client's network changed", near=True, silent=True)
            self._give_up_after(self.pings_s, it, False, "keepalive ping timed out")

    def _ping(self, for_s: float, chosen: Callable[[Connection], bool], ends: tuple[bool, ...]) -> None:
        for near in ends:
            wait_s = self.keepalive_s if near else self.pings_s
            if for_s > wait_s:
                asyncio.get_running_loop().call_later(wait_s, self._give_up_all, chosen, near)

    def _give_up_all(self, chosen: Callable[[Connection], bool], near: bool) -> None:
        for it in self._of(chosen):
            it.give_up("keepalive ping timed out", near=near)

    @staticmethod
    def _give_up_after(wait_s: float, it: Connection, near: bool, reason: str) -> None:
        asyncio.get_running_loop().call_later(wait_s, partial(it.give_up, reason, near=near))

    def _of(self, chosen: Callable[[Connection], bool]) -> list[Connection]:
        return [it for it in self.connections.values() if chosen(it)]
