"""Run one model over several ranks: rank 0 sends each step, all ranks run it, rank 0 alone samples.

Rank 0 holds a `ShardedModel`, which the engine above it uses like the model; the others `follow`. After a
failed step the ranks still agree only if all of them raised before any exchange, as the engine's own
refusals (GalleyError) do. After any other error the ranks no longer agree, and the replica ends.

A step is sent as flat int32 numbers: no pickle, nothing to execute.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from galley.common.logs import get_logger
from galley.core.errors import Broken, GalleyError
from galley.core.step import StepChunk, StepTrace, TokenMove
from galley.engine.parallel.process_group import ProcessGroup, RankLost
from galley.engine.states import check_states

if TYPE_CHECKING:
    from galley.engine.model import CausalModel, KvPool, ModelInfo

_LOG = get_logger(__name__)

_RUN, _STOP, _RUN_TRACED = 1, 2, 3
_SPAN = struct.Struct("<6i")
# Most steps fit into one broadcast of this many numbers.
_HEAD_NUMBERS = 1024
# 64 MB of rows and blocks: some hundred times the largest step.
_MAX_NUMBERS = 2**24


class ShardedModel:
    """Rank 0's view of the model; calls `on_loss` once, when a rank is lost or a step fails."""

    def __init__(self, model: CausalModel, plans: ProcessGroup, on_loss: Callable[[], None]) -> None:
        self._model = model
        self._plans = plans
        self._on_loss = on_loss
        self._lost = False

    @property
    def info(self) -> ModelInfo:
        return self._model.info

    @property
    def kv(self) -> KvPool:
        """Return this rank's part of the pool; the other ranks have as many blocks."""
        return self._model.kv

    def run_with_states(
        self,
        chunks: Sequence[StepChunk],
        copies: Sequence[tuple[int, int]] = (),
        watch: StepTrace | None = None,
        *,
        moves: Sequence[TokenMove] = (),
    ) -> tuple[Tensor, Tensor]:
        """Run a step on all ranks. Raise RankLost after a loss or a failed step, and then always.

        The states are whole on each rank, so only rank 0 reads them.
        """
        # The other ranks do not know of states, so these are refused before they get the step.
        check_states(chunks, self.info.layers)
        if self._lost:
            raise RankLost("this replica has lost a rank, or a step failed on it")
        try:
            return self._run(RankStep(chunks, copies, watch.span if watch else b"", moves), watch)
        except GalleyError as error:
            if isinstance(error, RankLost):
                self._lose()
            raise
        except BaseException:
            self._lose()
            raise

    def _run(self, step: RankStep, watch: StepTrace | None) -> tuple[Tensor, Tensor]:
        send_numbers(self._plans, encode(step))
        result = self._model.run_with_states(step.chunks, step.copies, watch, moves=step.moves)
        if watch is not None:
            watch.rank_ns = partial(self._collect, self._plans.share(watch.rank_ns()[0]))
        return result

    def _collect(self, exchanged: Callable[[], Sequence[int]]) -> Sequence[int]:
        try:
            return exchanged()
        except RankLost:
            self._lose()
            raise

    def stop(self) -> None:
        """Stop the other ranks. Call from the thread of `run`, or after the last `run` has returned."""
        if self._lost:
            return
        try:
            send_numbers(self._plans, [_STOP])
        except RankLost:
            _LOG.info("rank exited before it was stopped")

    def _lose(self) -> None:
        if not self._lost:
            self._lost = True
            self._on_loss()


def follow(model: CausalModel, plans: ProcessGroup, report: Callable[[StepTrace], None]) -> None:
    """Run the steps that rank 0 sends until it stops. Raise RankLost when another rank is lost.

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


def _run(
    model: CausalModel, plans: ProcessGroup, step: RankStep, report: Callable[[StepTrace], None]
) -> None:
    if not step.span:
        model.run(step.chunks, step.copies, moves=step.moves)
        return
    watch = StepTrace(step.span)
    model.run(step.chunks, step.copies, watch, moves=step.moves)
    exchanged = plans.share(watch.rank_ns()[0])
    report(watch)
    exchanged()


def send_numbers(plans: ProcessGroup, numbers: Sequence[int]) -> None:
    """Send up to _MAX_NUMBERS numbers, the count first. Raise RankLost, and Broken for more."""
    if len(numbers) > _MAX_NUMBERS:
        raise Broken(f"plan: must have at most {_MAX_NUMBERS} values, got {len(numbers)}")
    head = torch.zeros(_HEAD_NUMBERS, dtype=torch.int32)
    head[0] = len(numbers)
    values = torch.tensor(numbers, dtype=torch.int32)
    fitting = values[: _HEAD_NUMBERS - 1]
    head[1 : 1 + len(fitting)] = fitting
    plans.send(head)
    if len(values) > len(fitting):
        plans.send(values[len(fitting) :])


def receive_numbers(plans: ProcessGroup) -> list[int]:
    """Return the numbers that rank 0 sent. Raise RankLost, and Broken for an impossible count."""
    head = torch.zeros(_HEAD_NUMBERS, dtype=torch.int32)
    plans.receive(head)
    count = int(head[0])
    if not 0 <= count <= _MAX_NUMBERS:
        raise Broken(f"plan: must have 0 to {_MAX_NUMBERS} values, got {count}")
    numbers: list[int] = head[1 : min(count + 1, _HEAD_NUMBERS)].tolist()
    if count > len(numbers):
        rest = torch.zeros(count - len(numbers), dtype=torch.int32)
        plans.receive(rest)
        numbers += rest.tolist()
    return numbers


def agree(plans: ProcessGroup, rank: int, value: int) -> int:
    """Return rank 0's `value` on all ranks. Raise RankLost."""
    if rank == 0:
        send_numbers(plans, [value])
        return value
    return receive_numbers(plans)[0]


@dataclass(frozen=True, slots=True)
class RankStep:
    """The part of a step that all ranks run. `span` names it in a trace; empty if it is not traced."""

    chunks: Sequence[StepChunk]
    copies: Sequence[tuple[int, int]]
    span: bytes = b""
    moves: Sequence[TokenMove] = ()


def encode(step: RankStep) -> list[int]:
    """Return [kind, moves, copies, chunks, move..., (from, to)..., (start, want_logits, counts, ids...)...].

    For a traced step, the span's 24 bytes follow the kind, as six numbers. A chunk's counts and ids are those
    of its tokens, blocks and parents.
    """
    numbers = [_RUN_TRACED, *_SPAN.unpack(step.span)] if step.span else [_RUN]
    numbers += (len(step.moves), len(step.copies), len(step.chunks))
    for pair in (*step.moves, *step.copies):
        numbers += pair
    for chunk in step.chunks:
        ids = (chunk.tokens, chunk.blocks, chunk.parents)
        numbers += (chunk.start, chunk.want_logits, *map(len, ids))
        for part in ids:
            numbers += part
    return numbers


def decode(numbers: Sequence[int]) -> RankStep | None:
    """Return the encoded step; None for a stop. Raise Broken for anything else."""
    left = iter(numbers)
    kind = _take(left, 1)[0]
    if kind == _STOP:
        return None
    if kind not in (_RUN, _RUN_TRACED):
        raise Broken(f"plan: kind must be 1, 2 or 3, got {kind}")
    span = _SPAN.pack(*_take(left, 6)) if kind == _RUN_TRACED else b""
    move_count, copy_count, chunk_count = _take(left, 3)
    moves = tuple(TokenMove(*_take(left, 4)) for _ in range(move_count))
    flat = _take(left, 2 * copy_count)
    copies = tuple(zip(flat[::2], flat[1::2], strict=True))
    chunks = tuple(_chunk(left) for _ in range(chunk_count))
    if next(left, None) is not None:
        raise Broken("plan: must end after its last chunk, got more numbers")
    return RankStep(chunks, copies, span, moves)


def _chunk(left: Iterator[int]) -> StepChunk:
    start, want_logits, *counts = _take(left, 5)
    tokens, blocks, parents = (_take(left, count) for count in counts)
    return StepChunk(start, tokens, blocks, want_logits, parents=tuple(parents))


def _take(left: Iterator[int], count: int) -> list[int]:
    taken = [number for _, number in zip(range(count), left, strict=False)]
    if len(taken) < count:
        raise Broken(f"plan: must hold all numbers that it counts, got {len(taken)} of {count}")
    return taken
