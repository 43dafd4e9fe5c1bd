"""Run one model over several ranks: rank 0 sends each step, all ranks run it, rank 0 alone samples.

Rank 0 holds a `ShardedModel`, which the engine above it uses like the model; the others `follow`. After a
failed step the ranks still agree only if all of them raised before any exchange, as the engine's own
refusals (GalleyError) do. After any other error the ranks no longer agree, and the replica ends.
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
from services.target.ranks.plan_codec import RankStep, decode, encode, encode_stop

if TYPE_CHECKING:
    from galley.engine.model import CausalModel, KvPool, ModelInfo

_LOG = get_logger(__name__)

# Most steps fit into one broadcast of this many numbers.
_HEAD_NUMBERS = 1024
# 64 MB of rows and blocks: some hundred times the largest step.
_MAX_NUMBERS = 2**24


class Plans(Protocol):
    """The transport of plans from rank 0: `galley.engine.parallel.process_group.ProcessGroup`."""

    def send(self, values: Tensor) -> None:
        """Send int32 `values` to all other ranks; rank 0 calls it."""

    def receive(self, values: Tensor) -> None:
        """Fill `values` with what rank 0 sent; the other ranks call it."""

    def share(self, number: int) -> Callable[[], Sequence[int]]:
        """Begin to exchange a number with all ranks; the returned function waits for the numbers of all."""


class ShardedModel:
    """Rank 0's view of the model; calls `on_loss` once, when a rank is lost."""

    def __init__(self, model: CausalModel, plans: Plans, on_loss: Callable[[], None]) -> None:
        self._model = model
        self._plans = plans
        self._on_loss = on_loss
        self._lost = False

    @property
    def info(self) -> ModelInfo:
        """Return what the whole model is."""
        return self._model.info

    @property
    def kv(self) -> KvPool:
        """Return this rank's part of the pool; the other ranks have as many blocks."""
        return self._model.kv

    def run(
        self,
        chunks: Sequence[StepChunk],
        copies: Sequence[tuple[int, int]] = (),
        watch: StepTrace | None = None,
    ) -> Tensor:
        """Run a step on all ranks; see CausalModel.run. Raises RankLost, from then on always, after a loss.

        With a `watch`, the other ranks report their times while this rank samples.
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

    def _collect(self, exchanged: Callable[[], Sequence[int]]) -> Sequence[int]:
        try:
            return exchanged()
        except RankLost:
            self._lose()
            raise

    def stop(self) -> None:
        """Stop the other ranks; call from the thread of `run`, or after it has ended."""
        if self._lost:
            return
        try:
            send_numbers(self._plans, encode_stop())
        except RankLost:
            _LOG.info("rank exited before it was stopped")

    def _lose(self) -> None:
        if not self._lost:
            self._lost = True
            self._on_loss()


def follow(model: CausalModel, plans: Plans, report: Callable[[StepTrace], None]) -> None:
    """Run the steps that rank 0 sends until it stops. Raises RankLost when another rank is lost.

    `report` gets the times of each traced step at once.
    """
    while (step := decode(receive_numbers(plans))) is not None:
        try:
            _run(model, plans, step, report)
        except RankLost:
            raise
        except GalleyError as error:
            # Rank 0 raises the same, and reports it.
            _LOG.debug("step refused", error=str(error))


def _run(model: CausalModel, plans: Plans, step: RankStep, report: Callable[[StepTrace], None]) -> None:
    if not step.span:
        model.run(step.chunks, step.copies)
        return
    watch = StepTrace(step.span)
    model.run(step.chunks, step.copies, watch)
    exchanged = plans.share(watch.rank_ns()[0])
    report(watch)
    exchanged()


def send_numbers(plans: Plans, numbers: Sequence[int]) -> None:
    """Send up to _MAX_NUMBERS numbers, the count first. Raises RankLost, and Broken for more."""
    if len(numbers) > _MAX_NUMBERS:
        raise Broken(f"plan: at most {_MAX_NUMBERS} values, got {len(numbers)}")
    head = torch.zeros(_HEAD_NUMBERS, dtype=torch.int32)
    head[0] = len(numbers)
    values = torch.tensor(numbers, dtype=torch.int32)
    fitting = values[: _HEAD_NUMBERS - 1]
    head[1 : 1 + len(fitting)] = fitting
    plans.send(head)
    if len(values) > len(fitting):
        plans.send(values[len(fitting) :])


def receive_numbers(plans: Plans) -> list[int]:
    """Return what rank 0 sent. Raises RankLost, and Broken for an impossible count."""
    head = torch.zeros(_HEAD_NUMBERS, dtype=torch.int32)
    plans.receive(head)
    count = int(head[0])
    if not 0 <= count <= _MAX_NUMBERS:
        raise Broken(f"plan: at most {_MAX_NUMBERS} values, got {count}")
    numbers: list[int] = head[1 : min(count + 1, _HEAD_NUMBERS)].tolist()
    if count > len(numbers):
        rest = torch.zeros(count - len(numbers), dtype=torch.int32)
        plans.receive(rest)
        numbers += rest.tolist()
    return numbers


def agree(plans: Plans, rank: int, value: int) -> int:
    """Return rank 0's `value` on all ranks. Raises RankLost."""
    if rank == 0:
        send_numbers(plans, [value])
        return value
    return receive_numbers(plans)[0]
