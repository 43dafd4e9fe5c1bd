"""A timer for the next of many answers: set anew for each at the price of an assignment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.gateway.session.timeouts import SECOND


class Watch:
    """Calls `late` when what was expected has not come in time; times are nanoseconds of the event loop.

    `late` says for how long to wait on, None for no more. `stop` at the end.
    """

    def __init__(self, late: Callable[[], int | None]) -> None:
        self._late = late
        self._loop = asyncio.get_running_loop()
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False

    def expect(self, within_ns: int) -> None:
        """From now on, and not what was expected before."""
        self._due_s = self._loop.time() + within_ns / SECOND
        # A timer that goes off too early is set again; one that would go off too late, now.
        if self._timer is None or self._timer.when() > self._due_s:
            self._set()

    def stop(self) -> None:
        """Nothing more is expected."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def _set(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._due_s, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._loop.time() < self._due_s:
            self._set()
        elif (within_ns := self._late()) is not None and not self._stopped:
            self.expect(within_ns)
