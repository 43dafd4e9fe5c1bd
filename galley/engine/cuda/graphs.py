"""Passes of recurring shapes, recorded once on a device and played again: no launches by the host.

A recording reads one buffer that lies where it lay, and nothing else of the host's. What records is a
`Recorder`: CUDA graphs, or in tests whatever runs the pass again on the same buffer.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from galley.common.logs import get_logger

_LOG = get_logger(__name__)
# torch leaves some of it without types.
_CUDA: Any = torch.cuda
# Recording takes some passes' time, and memory that stays: only what comes again is worth it.
MOST_KEPT = 48
# The result of a recording stays where it is for as long as the recording.
MOST_KEPT_BYTES = 2**29
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
        with torch.cuda.stream(current):  # a capture that fails leaves its own stream the current one
            return self._captured(body, current)

    def _captured(self, body: Callable[[], Tensor], current: Any) -> Callable[[], Tensor]:
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


@dataclass(slots=True)
class _Kept:
    buffer: Tensor
    play: Callable[[], Tensor]
    result_bytes: int = 0


class Graphs:
    """At most `most` recordings by shape; a shape is recorded when it comes for the third time.

    When there are too many, or their results have more than `most_bytes` in all, the one goes that was not
    played for longest. A shape that cannot be recorded runs as it is, from then on.
    """

    def __init__(
        self,
        recorder: Recorder,
        device: torch.device,
        *,
        most: int = MOST_KEPT,
        most_bytes: int = MOST_KEPT_BYTES,
        sights: int = _SIGHTS,
    ) -> None:
        self._recorder = recorder
        self._device = device
        self._most = most
        self._most_bytes = most_bytes
        self._sights = sights
        self._seen: Counter[Hashable] = Counter()
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()
        self._never: set[Hashable] = set()

    def __len__(self) -> int:
        return len(self._kept)

    def run(self, shape: Hashable, packed: Tensor, body: Callable[[Tensor], Tensor]) -> Tensor:
        """`body` of the host's buffer `packed`, which goes to the device in one copy."""
        kept = self._kept.get(shape)
        if kept is None and self._recurs(shape):
            kept = self._record(shape, packed, body)
        if kept is None:
            return body(packed.to(self._device, non_blocking=True))
        self._kept.move_to_end(shape)
        kept.buffer.copy_(packed, non_blocking=True)
        result = kept.play()
        kept.result_bytes = result.nbytes
        self._drop_surplus()
        # The next pass of this shape writes its logits where these are.
        return result.clone()

    def _recurs(self, shape: Hashable) -> bool:
        if shape in self._never:
            return False
        self._seen[shape] += 1
        return self._seen[shape] >= self._sights

    def _record(self, shape: Hashable, packed: Tensor, body: Callable[[Tensor], Tensor]) -> _Kept | None:
        """None: it cannot be recorded, since it waits for the host, or for want of memory."""
        del self._seen[shape]
        buffer = packed.to(self._device, copy=True)
        try:
            play = self._recorder.record(lambda: body(buffer))
        except RuntimeError as error:
            if not self._never:
                _LOG.warning("a pass cannot be recorded and runs as it is", error=str(error))
            self._never.add(shape)
            return None
        kept = self._kept[shape] = _Kept(buffer, play)
        return kept

    def _drop_surplus(self) -> None:
        total = sum(kept.result_bytes for kept in self._kept.values())
        while len(self._kept) > 1 and (len(self._kept) > self._most or total > self._most_bytes):
            _, dropped = self._kept.popitem(last=False)
            total -= dropped.result_bytes
