"""Deliver the responses of replicas to the sessions, some of them in each turn of the event loop.

The gateway first reads messages and accepts calls, and delivers nothing meanwhile, for some milliseconds at
most. In a connection, a first token waits behind all responses before it. In this queue it goes first.

1. Sessions without a response so far come first: first tokens do not wait behind those of running sessions.
2. A request in its turn gets all that has arrived for it. So where responses arrive faster than they are
   delivered, each costs less, and the queue is bounded by the number of open requests.
3. The gateway is saturated while responses wait in a standing queue: if the shortest wait of an interval was
   too long (CoDel, RFC 8289, section 3). A single long turn of the event loop does not count.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

_TURN = 48
"""Responses delivered in one turn: about 1 ms. A request gets all of its own at once."""
_MESSAGE_TURNS, _CALL_TURNS = 2, 4
"""Turns in which a message that is there already is read, and a call is accepted, after the one before."""
_PAUSE_S = 0.005
"""Longest time without a delivery while messages or calls follow each other."""
_DELIVERY = 3
"""What a delivery adds to its responses: a commit, a message to the client."""
_INTERVAL_S = 0.5
_SATURATED_S = 0.25
"""Shortest wait in an interval from which on the gateway is saturated."""


class Recipient(Protocol):
    has_begun: bool
    """True if its session has had a response."""

    def deliver(self) -> int:
        """Take all that has arrived; return how many responses that were."""


class DeliveryQueue:
    """The queue of one gateway, for all its replicas; use it within the running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._first: deque[Recipient] = deque()
        self._later: deque[tuple[Recipient, float]] = deque()
        """Requests with the time since when they wait."""
        self._is_delivering = False
        self._pause = 0
        """Turns until responses are delivered, if nothing else comes."""
        self._delivered_s = 0.0
        """The last turn with a delivery, or the time since when there is something to deliver."""
        self._interval_s = 0.0
        """When the present interval began."""
        self._shortest_s: float | None = None
        """The shortest wait in it, and in the one before."""
        self._standing_s = 0.0

    def add(self, recipient: Recipient) -> None:
        """Give a request that does not wait yet its turn, soon."""
        loop = self._loop
        self._pause = max(self._pause, _MESSAGE_TURNS)
        if recipient.has_begun:
            self._later.append((recipient, loop.time()))
        else:
            self._first.append(recipient)
        if not self._is_delivering:
            self._is_delivering = True
            self._delivered_s = loop.time()
            loop.call_soon(self._deliver)

    def expect_calls(self) -> None:
        """Note a new call of a client: others may wait until gRPC accepts them."""
        self._pause = _CALL_TURNS

    def is_saturated(self, now_s: float) -> bool:
        """Return True while responses wait too long; `now_s` is the event loop's time."""
        return self._standing_s >= _SATURATED_S and now_s < self._interval_s + 2 * _INTERVAL_S

    def _deliver(self) -> None:
        now_s = self._loop.time()
        is_pausing = self._pause > 0 and now_s - self._delivered_s < _PAUSE_S
        self._pause = max(0, self._pause - 1)
        if not is_pausing:
            self._delivered_s = now_s
        left = _TURN
        try:
            self._measure(now_s)
            while left > 0 and (self._first or (self._later and not is_pausing)):
                recipient = self._first.popleft() if self._first else self._later.popleft()[0]
                left -= _DELIVERY + recipient.deliver()
        finally:
            self._is_delivering = bool(self._first or self._later)
            if self._is_delivering:
                self._loop.call_soon(self._deliver)

    def _measure(self, now_s: float) -> None:
        if now_s >= self._interval_s + _INTERVAL_S:
            self._standing_s = self._shortest_s or 0.0
            self._interval_s, self._shortest_s = now_s, None
        if self._later:
            wait_s = now_s - self._later[0][1]
            if self._shortest_s is None or wait_s < self._shortest_s:
                self._shortest_s = wait_s
