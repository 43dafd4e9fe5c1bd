"""Steps of recurring shapes, recorded once on a device and replayed: the host launches no kernels.

A recording reads buffers at fixed addresses, and nothing else of the host's. The `Recorder` makes CUDA
graphs; tests use one that runs the step again on the same buffer.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from galley.common.logs import get_logger

_LOG = get_logger(__name__)
# torch leaves some of it untyped.
_CUDA: Any = torch.cuda
# Recording takes the time of some steps, and keeps memory: only recurring shapes are worth it.
MAX_KEPT = 48
# A recording keeps its result's memory.
MAX_KEPT_BYTES = 2**29
_RECORD_AT = 3
_WARM_UPS = 2


class Recorder(Protocol):
    """A recorder of device work: `record` returns a function that does the work of `body` again.

    A replay uses the same memory and returns the same tensor. `body` may run any number of times, or not at
    all, while it is recorded.
    """

    def record(self, body: Callable[[], Tensor]) -> Callable[[], Tensor]: ...


class CudaRecorder:
    """CUDA graphs that share their memory, so that only one may be replayed at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: Any = torch.cuda.graph_pool_handle()

    def record(self, body: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return a replay of `body`; runs it first on another stream, where it may compile and allocate."""
        with torch.cuda.device(self._device):  # a capture uses the current device's stream
            return self._recorded(body)

    def _recorded(self, body: Callable[[], Tensor]) -> Callable[[], Tensor]:
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(current):  # a failed capture leaves its own stream current
            return self._captured(body, current)

    def _captured(self, body: Callable[[], Tensor], current: Any) -> Callable[[], Tensor]:
        aside = _CUDA.Stream(self._device)
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UPS):
                body()
        current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use the device at the same time.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            result = body()

        def play() -> Tensor:
            graph.replay()
            return result

        return play


@dataclass(slots=True)
class _Kept:
    buffers: Sequence[Tensor]
    play: Callable[[], Tensor]
    result_bytes: int = 0


class Graphs:
    """At most `max_kept` recordings by shape; a shape is recorded the third time it occurs.

    Above that, or `max_bytes` of results in all, the least recently replayed one is dropped. A shape that
    cannot be recorded runs unrecorded from then on.
    """

    def __init__(
        self,
        recorder: Recorder,
        device: torch.device,
        *,
        max_kept: int = MAX_KEPT,
        max_bytes: int = MAX_KEPT_BYTES,
        record_at: int = _RECORD_AT,
    ) -> None:
        self._recorder = recorder
        self._device = device
        self._max_kept = max_kept
        self._max_bytes = max_bytes
        self._record_at = record_at
        self._seen: Counter[Hashable] = Counter()
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()
        self._unrecordable: set[Hashable] = set()

    def __len__(self) -> int:
        return len(self._kept)

    def run(self, shape: Hashable, inputs: Sequence[Tensor], body: Callable[..., Tensor]) -> Tensor:
        """Return `body` of the inputs on the device; those of a shape always have the same sizes."""
        kept = self._kept.get(shape)
        if kept is None and self._recurs(shape):
            kept = self._record(shape, inputs, body)
        if kept is None:
            return body(*(part.to(self._device, non_blocking=True) for part in inputs))
        self._kept.move_to_end(shape)
        for buffer, part in zip(kept.buffers, inputs, strict=True):
            buffer.copy_(part, non_blocking=True)
        result = kept.play()
        kept.result_bytes = result.nbytes
        self._drop_surplus()
        # The next step of this shape overwrites these logits.
        return result.clone()

    def _recurs(self, shape: Hashable) -> bool:
        if shape in self._unrecordable:
            return False
        self._seen[shape] += 1
        return self._seen[shape] >= self._record_at

    def _record(self, shape: Hashable, inputs: Sequence[Tensor], body: Callable[..., Tensor]) -> _Kept | None:
        """Return the recording, or None if the step waits for the host or memory is short."""
        del self._seen[shape]
        buffers = [part.to(self._device, copy=True) for part in inputs]
        try:
            play = self._recorder.record(lambda: body(*buffers))
        except RuntimeError as error:
            if not self._unrecordable:
                _LOG.warning("step not recorded; running it unrecorded", error=str(error))
            self._unrecordable.add(shape)
            return None
        kept = self._kept[shape] = _Kept(buffers, play)
        return kept

    def _drop_surplus(self) -> None:
        total = sum(kept.result_bytes for kept in self._kept.values())
        while len(self._kept) > 1 and (len(self._kept) > self._max_kept or total > self._max_bytes):
            _, dropped = self._kept.popitem(last=False)
            total -= dropped.result_bytes
