"""Keep what was used last: a cache of a fixed size, and the keys seen in the last seconds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound="Hashable")
V = TypeVar("V")

RECENT_NS = 3_000_000_000


class LruCache(Generic[K, V]):
    """At most `capacity` values by key. A missing value is made; the least recently used one is dropped."""

    def __init__(self, make: Callable[[], V], capacity: int) -> None:
        self._make = make
        self._capacity = capacity
        self._values: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K, make: Callable[[], V] | None = None) -> V:
        value = self._values.get(key)
        if value is None:
            value = self._values[key] = (make or self._make)()
            if len(self._values) > self._capacity:
                self._values.popitem(last=False)
        self._values.move_to_end(key)
        return value


class RecentKeys:
    """The distinct keys added within a time window. Times are nanoseconds and never fall."""

    def __init__(self, window_ns: int = RECENT_NS) -> None:
        self._window_ns = window_ns
        self._added_ns: dict[Hashable, int] = {}  # oldest first

    def add(self, key: Hashable, now_ns: int) -> None:
        self._added_ns.pop(key, None)
        self._added_ns[key] = now_ns
        self._expire(now_ns)

    def remove(self, key: Hashable) -> None:
        self._added_ns.pop(key, None)

    def count(self, now_ns: int) -> int:
        self._expire(now_ns)
        return len(self._added_ns)

    def _expire(self, now_ns: int) -> None:
        while self._added_ns:
            oldest = next(iter(self._added_ns))
            if now_ns - self._added_ns[oldest] < self._window_ns:
                return
            del self._added_ns[oldest]
