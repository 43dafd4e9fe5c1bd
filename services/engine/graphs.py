"""Passes of recurring shapes, recorded once on a device and played again: no launches by the host.

A recording reads one buffer that lies where it lay, and nothing else of the host's. What records is a
`Recorder`: CUDA graphs, or in tests whatever runs the pass again on the same buffer.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from torch import Tensor

# torch leaves some of it without types.
_CUDA: Any = torch.cuda
# Recording takes some passes' time, and memory that stays: only what comes again is worth it.
MOST_KEPT = 48
_SIGHTS = 3
_WARM_UPS = 2


class Recorder(Protocol):
    """Makes of a function one that does the same again, on the same memory, with the same result tensor.

    The function may be run while it is recorded, once or several times, or not at all.
    """

    def record(self, body: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """What plays `body`."""


class CudaRecorder:
    """CUDA graphs that share their memory, so that only one may be played at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: Any = torch.cuda.graph_pool_handle()

    def record(self, body: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See `Recorder`. What compiles or allocates at a first call does so before, on another stream."""
        with torch.cuda.device(self._device):  # a capture takes its stream from the current device
            return self._recorded(body)

    def _recorded(self, body: Callable[[], Tensor]) -> Callable[[], Tensor]:
        current = torch.cuda.current_stream(self._device)
        aside = _CUDA.Stream(self._device)
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UPS):
                body()
        current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            result = body()

        def play() -> Tensor:
            graph.replay()
            return result

        return play


@dataclass(frozen=True, slots=True)
class _Kept:
    buffer: Tensor
    play: Callable[[], Tensor]


class Graphs:
    """At most `most` recordings by shape; a shape is recorded when it comes for the third time.

    When there are too many, the one goes that was not played for longest.
    """

    def __init__(
        self, recorder: Recorder, device: torch.device, *, most: int = MOST_KEPT, sights: int = _SIGHTS
    ) -> None:
        self._recorder = recorder
        self._device = device
        self._most = most
        self._sights = sights
        self._seen: Counter[Hashable] = Counter()
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def run(self, shape: Hashable, packed: Tensor, body: Callable[[Tensor], Tensor]) -> Tensor:
        """`body` of the host's buffer `packed`, which goes to the device in one copy."""
        kept = self._kept.get(shape)
        if kept is None and not self._recurs(shape):
            return body(packed.to(self._device, non_blocking=True))
        if kept is None:
            kept = self._record(shape, packed, body)
        self._kept.move_to_end(shape)
        kept.buffer.copy_(packed, non_blocking=True)
        # The next pass of this shape writes its logits where these are.
        return kept.play().clone()

    def _recurs(self, shape: Hashable) -> bool:
        self._seen[shape] += 1
        return self._seen[shape] >= self._sights

    def _record(self, shape: Hashable, packed: Tensor, body: Callable[[Tensor], Tensor]) -> _Kept:
        buffer = packed.to(self._device, copy=True)
        kept = _Kept(buffer, self._recorder.record(lambda: body(buffer)))
        self._kept[shape] = kept
        del self._seen[shape]
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return kept
