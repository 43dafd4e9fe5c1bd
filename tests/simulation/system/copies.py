"""The replicas of the simulated Redis: each applies the writes of the server in order, some time later."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.simulation.system.network import Network

if TYPE_CHECKING:
    from tests.simulation.system.redis import Sessions

_TICK_S = 1e-6


class Copy:
    """One replica, which has the first `offset` writes; `acked` is what the server knows of that."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.offset = 0
        self.acked = 0
        self.entries: dict[str, Any] = {}
        self.last_s = {True: 0.0, False: 0.0}


class Copies:
    """The replicas of `server`; of what it writes, `wanted` of them must have a copy (WAIT)."""

    def __init__(self, network: Network, server: str, count: int, wanted: int) -> None:
        self.wanted = wanted
        self.all = [Copy(f"copy-{i}") for i in range(count)]
        self._network = network
        self._server = server
        self._offset = 0
        self._life = 0
        self._waiting: list[tuple[int, Callable[[], None]]] = []

    def wrote(self, sessions: Sessions, session_id: str) -> int:
        """Send a session to all replicas; return the offset of this write."""
        self._offset += 1
        if self.all:
            entry = sessions.entry(session_id)
            for copy in self.all:
                apply = partial(self._apply, self._life, copy, self._offset, session_id, entry)
                self._send(copy, apply, forth=True)
        return self._offset

    def when_copied(self, offset: int, then: Callable[[], None]) -> None:
        """Call `then` once enough replicas are known to have the writes up to `offset`."""
        self._waiting.append((offset, then))
        self._tell()

    def forget_calls(self) -> None:
        """Drop the calls that wait: the server has lost their connections."""
        self._waiting.clear()

    def is_enough(self, offset: int) -> bool:
        return sum(copy.acked >= offset for copy in self.all) >= self.wanted

    def promote(self, sessions: Sessions, *, latest: bool) -> bool:
        """Make the replica that has most, or else least, the server; return True if it lacks a write."""
        chosen = (max if latest else min)(self.all, key=_offset_of)
        lacks = chosen.offset < self._offset
        sessions.adopt(chosen.entries)
        self.follow(sessions)
        return lacks

    def follow(self, sessions: Sessions) -> None:
        """Give all replicas the state of the server; what is under way to them is lost."""
        self._life += 1
        self._waiting.clear()
        for copy in self.all:
            copy.entries = sessions.entries()
            copy.offset = copy.acked = self._offset

    def _apply(self, life: int, copy: Copy, offset: int, session_id: str, entry: object) -> None:
        if life == self._life:
            copy.offset = offset
            copy.entries[session_id] = entry
            self._send(copy, partial(self._acknowledge, life, copy, offset), forth=False)

    def _acknowledge(self, life: int, copy: Copy, offset: int) -> None:
        if life == self._life:
            copy.acked = offset
            self._tell()

    def _tell(self) -> None:
        ready = [it for it in self._waiting if self.is_enough(it[0])]
        if ready:
            self._waiting = [it for it in self._waiting if it not in ready]
            for _, then in ready:
                then()

    def _send(self, copy: Copy, deliver: Callable[[], None], *, forth: bool) -> None:
        ends = (self._server, copy.name) if forth else (copy.name, self._server)
        at_s = max(self._network.arrival_s(*ends), copy.last_s[forth] + _TICK_S)
        copy.last_s[forth] = at_s
        self._network.loop.call_at(at_s, deliver)


def _offset_of(copy: Copy) -> int:
    return copy.offset
