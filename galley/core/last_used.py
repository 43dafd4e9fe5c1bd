"""What is kept by key as long as it is used now and again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound="Hashable")
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """What is kept by key, such as a tenant's workload: made when first asked for, the last used stay."""

    def __init__(self, make: Callable[[], V], most: int) -> None:
        self._make = make
        self._most = most
        self._kept: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, key: K, make: Callable[[], V] | None = None) -> V:
        """What is kept by `key`, or made; where there are more than `most`, the longest unused goes."""
        value = self._kept.get(key)
        if value is None:
            value = self._kept[key] = (make or self._make)()
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return value
