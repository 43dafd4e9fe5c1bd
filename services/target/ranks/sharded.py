"""One model over several ranks: rank 0 says what is run, all run it, rank 0 alone samples.

Rank 0 holds a `ShardedModel`, which looks to the engine above it like the model; the others `follow`. A pass
that fails leaves the ranks agreed only if all of them raise before they exchange anything: the engine's own
refusals (GalleyError) do. After anything else the ranks no longer agree, and the replica is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from galley.common.logs import get_logger
from galley.core.errors import Broken, GalleyError
from galley.core.step import StepChunk, StepTrace
from galley.engine.parallel.process_group import RankLost
from services.target.ranks.plan_codec import Pass, decode, encode, encode_stop

if TYPE_CHECKING:
    from galley.engine.model import CausalModel, KvPool, ModelInfo

_LOG = get_logger(__name__)

# Most passes fit into one broadcast of this many numbers.
_FIRST = 1024
# More are no plan: 64 MB of rows and blocks are some hundred times the largest pass.
_MOST = 2**24


class Plans(Protocol):
    """How plans travel from rank 0 to the others: `galley.engine.parallel.process_group.ProcessGroup`."""

    def send(self, values: Tensor) -> None:
        """Rank 0: give int32 `values` to all others."""

    def receive(self, values: Tensor) -> None:
        """The others: fill `values`."""

    def share(self, number: int) -> Callable[[], Sequence[int]]:
        """All ranks: begin to tell the others a number; what it gives waits for theirs."""


class ShardedModel:
    """Rank 0's model: all ranks run every pass. `on_loss` is called once, when they are no longer one."""

    def __init__(self, model: CausalModel, plans: Plans, on_loss: Callable[[], None]) -> None:
        self._model = model
        self._plans = plans
        self._on_loss = on_loss
        self._lost = False

    @property
    def info(self) -> ModelInfo:
        """Of the whole model."""
        return self._model.info

    @property
    def kv(self) -> KvPool:
        """This rank's part of the pool; the others have as many blocks."""
        return self._model.kv

    def run(
        self,
        chunks: Sequence[StepChunk],
        copies: Sequence[tuple[int, int]] = (),
        watch: StepTrace | None = None,
    ) -> Tensor:
        """As CausalModel.run. Raises RankLost, now and ever after, when a rank has gone.

        Of a pass with a `watch` the others say what it took while this rank samples.
        """
        if self._lost:
            raise RankLost("this replica has lost a rank")
        try:
            return self._run(chunks, copies, watch)
        except GalleyError as error:
            if isinstance(error, RankLost):
                self._lose()
            raise
        except BaseException:
            self._lose()
            raise

    def _run(
        self, chunks: Sequence[StepChunk], copies: Sequence[tuple[int, int]], watch: StepTrace | None
    ) -> Tensor:
        send_numbers(self._plans, encode(chunks, copies, watch.span if watch else b""))
        logits = self._model.run(chunks, copies, watch)
        if watch is not None:
            watch.rank_ns = partial(self._collect, self._plans.share(watch.rank_ns()[0]))
        return logits

    def _collect(self, told: Callable[[], Sequence[int]]) -> Sequence[int]:
        try:
            return told()
        except RankLost:
            self._lose()
            raise

    def stop(self) -> None:
        """Let the other ranks end; call from the thread of `run`, or after it has ended."""
        if self._lost:
            return
        try:
            send_numbers(self._plans, encode_stop())
        except RankLost:
            _LOG.info("a rank had ended before it was told to")

    def _lose(self) -> None:
        if not self._lost:
            self._lost = True
            self._on_loss()


def follow(model: CausalModel, plans: Plans, tell: Callable[[StepTrace], None]) -> None:
    """Run what rank 0 says until it says stop. Raises RankLost when rank 0, or another, has gone.

    `tell` hears at once what a traced pass took here.
    """
    while (work := decode(receive_numbers(plans))) is not None:
        try:
            _run(model, plans, work, tell)
        except RankLost:
            raise
        except GalleyError as error:
            # Rank 0 raises the same, and answers it.
            _LOG.debug("a pass was refused", problem=str(error))


def _run(model: CausalModel, plans: Plans, work: Pass, tell: Callable[[StepTrace], None]) -> None:
    if not work.span:
        model.run(work.chunks, work.copies)
        return
    watch = StepTrace(work.span)
    model.run(work.chunks, work.copies, watch)
    told = plans.share(watch.rank_ns()[0])
    tell(watch)
    told()


def send_numbers(plans: Plans, numbers: Sequence[int]) -> None:
    """Rank 0: send up to _MOST numbers, the count first. Raises RankLost, and Broken for more."""
    if len(numbers) > _MOST:
        raise Broken(f"a plan of {len(numbers)} numbers, of which {_MOST} are the most")
    head = torch.zeros(_FIRST, dtype=torch.int32)
    head[0] = len(numbers)
    values = torch.tensor(numbers, dtype=torch.int32)
    fitting = values[: _FIRST - 1]
    head[1 : 1 + len(fitting)] = fitting
    plans.send(head)
    if len(values) > len(fitting):
        plans.send(values[len(fitting) :])


def receive_numbers(plans: Plans) -> list[int]:
    """The others: what rank 0 sent. Raises RankLost, and Broken for a count that it cannot have sent."""
    head = torch.zeros(_FIRST, dtype=torch.int32)
    plans.receive(head)
    count = int(head[0])
    if not 0 <= count <= _MOST:
        raise Broken(f"a rank was sent a plan of {count} numbers, of which {_MOST} are the most")
    numbers: list[int] = head[1 : min(count + 1, _FIRST)].tolist()
    if count > len(numbers):
        rest = torch.zeros(count - len(numbers), dtype=torch.int32)
        plans.receive(rest)
        numbers += rest.tolist()
    return numbers


def agree(plans: Plans, rank: int, value: int) -> int:
    """Rank 0's `value`, on all ranks. Raises RankLost."""
    if rank == 0:
        send_numbers(plans, [value])
        return value
    return receive_numbers(plans)[0]
