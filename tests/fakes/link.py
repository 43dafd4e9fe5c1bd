"""What becomes of bytes between two processes: a `Relay` asks it of each piece, and it may change any time.

The disturbances are those that TCP makes of what networks do, at any distance and without privileges:

- delay: each piece comes later by the same time.
- loss: TCP sends again what is lost, after a timeout that doubles each time (RFC 6298: no less than a second,
  on Linux 200 ms), and gives nothing out of order. So a lost piece is late, and all behind it are.
- a partition (`cut`): nothing passes, neither bytes nor ends of connections; new connections hang. Once
  mended, what waited is passed on, as TCP then sends it again.
- `reset`: all connections end at once, as where a middlebox has forgotten them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from random import Random
from typing import Protocol

RESEND_S = 0.2
"""Linux' least retransmission timeout (TCP_RTO_MIN)."""
_MOST_LOSSES = 4


class Connection(Protocol):
    def pass_on(self) -> None:
        """Pass on what is due; the link was mended."""

    def reset(self) -> None:
        """End at once, at both ends."""


class Link:
    def __init__(self, delay_s: float = 0.0, seed: int = 0) -> None:
        self._delay_s = delay_s
        self._loss = 0.0
        self._chance = Random(seed)
        self._whole = asyncio.Event()
        self._whole.set()
        self._connections: set[Connection] = set()
        self._used = asyncio.Event()

    @property
    def is_cut(self) -> bool:
        return not self._whole.is_set()

    def delay(self, delay_s: float) -> None:
        self._delay_s = delay_s

    def lose(self, share: float) -> None:
        """Lose this share of the pieces at each try; at least 0 and less than 1."""
        self._loss = share

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        self._delay_s = self._loss = 0.0
        self._whole.set()
        for connection in list(self._connections):
            connection.pass_on()

    def reset(self) -> None:
        for connection in list(self._connections):
            connection.reset()

    async def used(self) -> None:
        await self._used.wait()

    async def whole(self) -> None:
        await self._whole.wait()

    def lateness_s(self) -> float:
        return self._delay_s + sum(self._resends())

    def _resends(self) -> Iterator[float]:
        for losses in range(_MOST_LOSSES):
            if self._chance.random() >= self._loss:
                return
            yield RESEND_S * 2**losses

    def begin(self, connection: Connection) -> None:
        self._connections.add(connection)
        self._used.set()

    def end(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._used.clear()
