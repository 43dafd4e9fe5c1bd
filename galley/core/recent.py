"""How many different sessions were there within the last seconds: the load that they are, while they last."""

from __future__ import annotations

from collections.abc import Hashable

RECENT_NS = 3_000_000_000


class RecentKeys:
    """Keys by when they were last noted; times in nanoseconds, never falling."""

    def __init__(self, window_ns: int = RECENT_NS) -> None:
        self._window_ns = window_ns
        self._noted: dict[Hashable, int] = {}

    def note(self, key: Hashable, now_ns: int) -> None:
        """It is here now."""
        self._noted.pop(key, None)
        self._noted[key] = now_ns
        self._forget(now_ns)

    def drop(self, key: Hashable) -> None:
        """It has gone elsewhere."""
        self._noted.pop(key, None)

    def count(self, now_ns: int) -> int:
        """How many were noted within the window."""
        self._forget(now_ns)
        return len(self._noted)

    def _forget(self, now_ns: int) -> None:
        """The oldest come first: all that is to be forgotten is at the front."""
        while self._noted:
            oldest = next(iter(self._noted))
            if now_ns - self._noted[oldest] < self._window_ns:
                return
            del self._noted[oldest]
