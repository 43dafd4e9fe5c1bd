"""Process groups of ranks that are threads of one process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from torch import Tensor

    from galley.engine.parallel.process_group import ProcessGroup

_TIMEOUT_S = 60


class Hub:
    """Connects `size` ranks; `ends[r]` takes the place of rank r's process group."""

    def __init__(self, size: int) -> None:
        self.plans: list[queue.Queue[Tensor]] = [queue.Queue() for _ in range(size)]
        self.numbers = [0] * size
        self.met = threading.Barrier(size)
        self.ends = [cast("ProcessGroup", End(self, rank)) for rank in range(size)]


class End:
    """One rank's."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub = hub
        self._rank = rank

    def send(self, values: Tensor) -> None:
        for plans in self._hub.plans[1:]:
            plans.put(values.clone())

    def receive(self, values: Tensor) -> None:
        values.copy_(self._hub.plans[self._rank].get(timeout=_TIMEOUT_S))

    def share(self, number: int) -> Callable[[], Sequence[int]]:
        self._hub.numbers[self._rank] = number

        def exchanged() -> Sequence[int]:
            self._hub.met.wait(_TIMEOUT_S)
            numbers = list(self._hub.numbers)
            # Nobody writes the next one before all have read.
            self._hub.met.wait(_TIMEOUT_S)
            return numbers

        return exchanged
