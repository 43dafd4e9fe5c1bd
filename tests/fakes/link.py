"""The state of a link between two processes, which a `Relay` reads for each piece of data it forwards.

The disturbances are what programs see of network faults through TCP; they need no privileges:

- delay: each piece arrives later by the same time.
- bandwidth: a direction of a connection takes this many bits a second; a piece waits for those before it.
- loss: TCP resends a lost piece after a timeout that doubles each time (RFC 6298: at least a second; on Linux
  200 ms) and delivers in order. So a lost piece, and all pieces after it, are late.
- a cut: nothing passes, neither bytes nor ends of connections; new connections hang. After `mend`, the
  waiting bytes are delivered, as TCP resends them. A one-way cut holds back only what the caller sends
  (requests), or only what it receives (responses).
- `reset`: all connections end at once, as when a middlebox has dropped its state.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from random import Random
from typing import Protocol

RESEND_S = 0.2
"""Least retransmission timeout of Linux (TCP_RTO_MIN)."""
_MOST_LOSSES = 4


class Connection(Protocol):
    def pass_on(self) -> None:
        """Forward what is due, after the link was mended."""

    def reset(self) -> None:
        """Close both ends at once."""


class Link:
    def __init__(self, delay_s: float = 0.0, seed: int = 0, bits_per_s: float = math.inf) -> None:
        self._delay_s = delay_s
        self._bits_per_s = bits_per_s
        self._loss = 0.0
        self._chance = Random(seed)
        self._whole = asyncio.Event()
        self._whole.set()
        self._cut: frozenset[bool] = frozenset()
        self._connections: set[Connection] = set()
        self._used = asyncio.Event()

    def is_cut(self, *, requests: bool) -> bool:
        """Return True if requests, else responses, do not pass."""
        return requests in self._cut

    def delay(self, delay_s: float) -> None:
        self._delay_s = delay_s

    def lose(self, share: float) -> None:
        """Lose this share, in [0, 1), of the pieces at each try to send them."""
        self._loss = share

    def cut(self, *, requests: bool = True, responses: bool = True) -> None:
        self._cut = frozenset({True} if requests else ()) | frozenset({False} if responses else ())
        self._whole.clear()

    def mend(self) -> None:
        self._delay_s = self._loss = 0.0
        self._cut = frozenset()
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

    def sending_s(self, size: int) -> float:
        """Return for how long `size` bytes occupy a direction of a connection."""
        return 8 * size / self._bits_per_s

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
