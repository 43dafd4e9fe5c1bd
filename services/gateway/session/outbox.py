"""Queue what a session has emitted and its client was not sent yet: a range of its answer, for one reader.

Items are made when the transport takes them. So tokens that wait for it, or for their turn of a busy event
loop, go into one message, and a long answer that is resumed is made in pieces. The session machine bounds how
many tokens wait. If they wait for the client's time limit, the client has stalled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeAlias

from galley.core.answer.answer import Chunk, NumericsChanged
from galley.core.errors import ClientStalled
from galley.core.session import events as ev
from galley.core.session.events import Clock
from services.gateway.clock import SECOND
from services.gateway.telemetry.observer import request_observer

Item: TypeAlias = Chunk | NumericsChanged


class Outbox:
    """The emitted tokens of one session. `report` gets Sent, and Interrupted if the client stalls."""

    def __init__(
        self,
        clock: Clock,
        stall_ns: int,
        chunks: Callable[[int, int], Iterator[Item]],
        report: Callable[[ev.Event], None],
        report_tokens: int = 1,
    ) -> None:
        """`stall_ns` is how long the client may leave its stream unread.

        `chunks` makes the items of a range of output tokens. Sent is reported for at least `report_tokens`.
        """
        self.stall_s = stall_ns / SECOND
        self.stalled: ClientStalled | None = None
        self._clock = clock
        self._chunks = chunks
        self._report = report
        self._report_tokens = report_tokens
        self._reported = 0
        self._observer = request_observer()
        self._loop = asyncio.get_running_loop()
        self._items: Iterator[Item] = iter(())
        """The rest of what was begun to be made."""
        self._sent = self._end = 0
        """Output tokens [_sent, _end) wait for the reader."""
        self._is_behind = False
        """True if some of them waited already when the last item was taken."""
        self._last: ev.End | None = None
        self._since_ns, self._since_s = 0, 0.0
        """The times, of the clock and of the loop, since when the next item waits."""
        self._timer: asyncio.TimerHandle | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._has_reader = True

    @property
    def has_unsent(self) -> bool:
        return self._sent < self._end

    def put(self, start: int, end: int) -> None:
        """Add output tokens [start, end), the next ones; drop them once the client has stalled or left."""
        if not self._has_reader:
            self._sent = self._end = end
            self._report(ev.Sent(end))
        elif self.stalled is None:
            if not self.has_unsent:
                self._sent = start
                self._wait()
            self._end = end
            self._wake()

    def end(self, end: ev.End) -> None:
        self.close()
        self._last = end
        self._wake()

    async def next(self) -> Item | ev.End:
        """Return the next item; End is the last. Call it once the transport has taken the item before."""
        if self._is_behind:
            await asyncio.sleep(0)  # a transport may take all that is ready in one turn
        while (item := self._take()) is None:
            await self._change()
        return item

    async def flush(self, timeout_s: float | None = None) -> None:
        """Return once all items are sent, the client has stalled, or the time is up."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.has_unsent and self.stalled is None:
                    await self._change()

    async def left_unread(self) -> None:
        """Return once the client has read nothing, and nothing was added, for `stall_s` seconds."""
        with suppress(TimeoutError):
            while True:
                async with asyncio.timeout(self.stall_s):
                    await self._change()

    def discard(self) -> None:
        """Count all tokens as sent, also those to come: nobody reads them any more."""
        self._has_reader = False
        self._drop()
        self._wake()
        self._report(ev.Sent(self._end))

    def close(self) -> None:
        """Drop what was not sent, and report nothing any more, so that the session can be freed."""
        if self.has_unsent:
            self._observer.sent(self._waited_ns())
        self._drop()
        self._report = _ignore

    def _drop(self) -> None:
        self._sent, self._items = self._end, iter(())
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _take(self) -> Item | ev.End | None:
        if not self.has_unsent:
            if self._last is not None:
                self._wake()  # `left_unread` counts this as reading
            return self._last
        item = next(self._items, None)
        if item is None:
            self._items = self._chunks(self._sent, self._end)
            item = next(self._items)
        self._observer.sent(self._waited_ns())
        if isinstance(item, Chunk):
            self._sent = item.index + len(item.tokens)
        else:
            self._observer.numerics_changed(item)
        self._is_behind = self.has_unsent
        if self._is_behind:
            self._wait()
        self._wake()
        if self._sent - self._reported >= self._report_tokens:
            self._reported = self._sent
            self._report(ev.Sent(self._sent))
        return item

    def _waited_ns(self) -> int:
        """Return how long the next item has waited, since it was put and the one before it was sent."""
        return self._clock.now_ns() - self._since_ns

    def _wait(self) -> None:
        """Note that the next item waits from now on. A timer for many items costs less than one for each."""
        self._since_ns, self._since_s = self._clock.now_ns(), self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self.stall_s, self._check)

    def _check(self) -> None:
        """End a stream that was left unread for the time limit."""
        self._timer = None
        if not self.has_unsent:
            return
        late_s = self._since_s + self.stall_s
        if self._loop.time() < late_s:
            self._timer = self._loop.call_at(late_s, self._check)
            return
        self.stalled, report = self.stalled_error(), self._report
        self.close()
        self._wake()
        report(ev.Interrupted(self.stalled))

    def stalled_error(self) -> ClientStalled:
        return ClientStalled(f"the stream was left unread for {self.stall_s:g} s; resume to go on")

    async def _change(self) -> None:
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        await waiter

    def _wake(self) -> None:
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)


def _ignore(_event: ev.Event) -> None:
    """Take a report of a session that has stopped."""
