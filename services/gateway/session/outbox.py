"""The queue between a session and its client's transport.

The first item counts as sent: the transport takes it as soon as it has room. The session machine bounds how
many tokens wait behind it. If they wait for the client's time limit, the client has stalled.

Only the first items are made: those of a long answer that is resumed would take the event loop too long.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TypeAlias

from galley.core.answer.answer import Chunk, NumericsChanged
from galley.core.errors import ClientStalled
from galley.core.session import events as ev
from galley.core.session.events import Clock
from services.gateway.clock import SECOND
from services.gateway.telemetry.observer import request_observer

Item: TypeAlias = Chunk | NumericsChanged

_READY_ITEMS = 8


class Outbox:
    """Items of one session, for one reader. `report` gets Sent, and Interrupted if the client stalls."""

    def __init__(self, clock: Clock, stall_ns: int, report: Callable[[ev.Event], None]) -> None:
        """`stall_ns` is how long the client may leave its stream unread."""
        self.stall_s = stall_ns / SECOND
        self.stalled: ClientStalled | None = None
        self._clock = clock
        self._report = report
        self._observer = request_observer()
        self._items: deque[tuple[Item | ev.End, int]] = deque()
        self._later: deque[tuple[Iterator[Item | ev.End], int]] = deque()
        """Items to be made, with the time when they were put."""
        self._end = 0
        """Output tokens [0, _end) were put."""
        self._sent_ns = 0
        """The time when the last item counted as sent."""
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._has_reader = True

    def put(self, items: Iterable[Item], end: int = 0) -> None:
        """Add items, up to output token `end`; drop them once the client has stalled or left."""
        self._end = end
        if not self._has_reader:
            self._report(ev.Sent(end))
        elif self.stalled is None:
            self._add(items)

    def end(self, end: ev.End) -> None:
        self.close()
        self._add((end,))

    def _add(self, items: Iterable[Item | ev.End]) -> None:
        self._later.append((iter(items), self._clock.now_ns()))
        self._fill()
        self._changed.set()

    def _fill(self) -> None:
        while self._later and len(self._items) < _READY_ITEMS:
            items, put_ns = self._later[0]
            item = next(items, None)
            if item is None:
                self._later.popleft()
                continue
            self._items.append((item, put_ns))
            if len(self._items) == 1:
                self._send_first()
            elif len(self._items) == 2:
                self._watch()

    async def next(self) -> Item | ev.End:
        """Return the next item; End is the last. Call it once the transport has taken the item before."""
        while not self._items:
            await self._change()
        if len(self._items) > 1:
            await asyncio.sleep(0)  # a transport may take all that is ready in one turn
        item, _ = self._items.popleft()
        if self._items:
            self._send_first()
        self._fill()
        self._watch()
        self._changed.set()
        return item

    async def flush(self, timeout_s: float | None = None) -> None:
        """Return once all items are sent, the client has stalled, or the time is up."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while len(self._items) > 1 and self.stalled is None:
                    await self._change()

    async def left_unread(self) -> None:
        """Return once the client has read nothing, and nothing was added, for `stall_s` seconds."""
        with suppress(TimeoutError):
            while True:
                async with asyncio.timeout(self.stall_s):
                    await self._change()

    def discard(self) -> None:
        """Count all items as sent, also those to come: nobody reads them any more."""
        self._has_reader = False
        self._items.clear()
        self._later.clear()
        self._report(ev.Sent(self._end))
        self._watch()
        self._changed.set()

    def close(self) -> None:
        if len(self._items) > 1 and not isinstance(self._items[1][0], ev.End):
            self._observer.sent(self._waited_ns(1))
        self._later.clear()
        while len(self._items) > 1:
            self._items.pop()
        self._watch()

    def _send_first(self) -> None:
        item, _ = self._items[0]
        waited_ns = self._waited_ns(0)
        self._sent_ns = self._clock.now_ns()
        if not isinstance(item, ev.End):
            self._observer.sent(waited_ns)
        if isinstance(item, Chunk):
            self._report(ev.Sent(item.index + len(item.tokens)))

    def _waited_ns(self, index: int) -> int:
        """Return how long an item has waited for room, since it was put and the one before it was sent."""
        return self._clock.now_ns() - max(self._items[index][1], self._sent_ns)

    def _watch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if len(self._items) > 1 and not isinstance(self._items[1][0], ev.End):
            self._timer = asyncio.get_running_loop().call_later(self.stall_s, self._stall)

    def _stall(self) -> None:
        self._timer = None
        self.stalled = self.stalled_error()
        self.close()
        self._changed.set()
        self._report(ev.Interrupted(self.stalled))

    def stalled_error(self) -> ClientStalled:
        return ClientStalled(f"the stream was left unread for {self.stall_s:g} s; resume to go on")

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
