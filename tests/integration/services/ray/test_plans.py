"""What rank 0 tells the others: nothing is lost on the way, and what is no plan is refused."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from galley.core.errors import Broken
from galley.core.step import StepChunk, StepTrace, TokenMove
from galley.engine.model import CausalModel
from galley.engine.parallel.process_group import ProcessGroup, RankLost
from services.target.ranks.sharded import (
    RankStep,
    ShardedModel,
    decode,
    encode,
    follow,
    receive_numbers,
    send_numbers,
)

NUMBERS = st.integers(0, 2**31 - 1)


def lists(most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(NUMBERS, max_size=most)


PARENTS = st.lists(st.integers(-1, 2**31 - 1), max_size=4).map(tuple)
CHUNKS = st.builds(StepChunk, NUMBERS, lists(9), lists(5), NUMBERS, parents=PARENTS)
COPIES = st.lists(st.tuples(NUMBERS, NUMBERS), max_size=3).map(tuple)
MOVES = st.lists(st.builds(TokenMove, NUMBERS, NUMBERS, NUMBERS, NUMBERS), max_size=3).map(tuple)
SPANS = st.just(b"") | st.binary(min_size=24, max_size=24)


def steps(least: int) -> st.SearchStrategy[RankStep]:
    chunks = st.lists(CHUNKS, min_size=least, max_size=4).map(tuple)
    return st.builds(RankStep, chunks, COPIES, SPANS, MOVES)


@settings(max_examples=100)
@given(steps(0))
def test_a_plan_arrives_as_it_was(step: RankStep) -> None:
    sent = torch.tensor(encode(step), dtype=torch.int32)
    assert decode(sent.tolist()) == step


@settings(max_examples=100)
@given(steps(1), st.data())
def test_a_plan_cut_short_is_refused(step: RankStep, data: st.DataObject) -> None:
    whole = encode(step)
    with pytest.raises(Broken):
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))])


@pytest.mark.parametrize("numbers", [[7], [1, 0, 0, 0, 5]])
def test_invalid_plan_is_refused(numbers: list[int]) -> None:
    with pytest.raises(Broken):
        decode(numbers)


class Wire(ProcessGroup):
    """Both ends in one thread; `lost` is raised in place of the next sending."""

    def __init__(self) -> None:
        self.sent: deque[Tensor] = deque()
        self.lost = False

    def send(self, values: Tensor) -> None:
        if self.lost:
            raise RankLost("a test lost it")
        self.sent.append(values.clone())

    def receive(self, values: Tensor) -> None:
        if not self.sent:
            raise RankLost("rank 0 has gone")
        values.copy_(self.sent.popleft())

    def share(self, number: int) -> Callable[[], Sequence[int]]:
        raise AssertionError(f"no pass is traced here, and {number} ns are of no use")


@pytest.mark.parametrize("count", [0, 1, 1022, 1023, 1024, 1025, 70_000])
def test_numbers_of_any_count_arrive(count: int) -> None:
    wire = Wire()
    send_numbers(wire, list(range(count)))
    assert receive_numbers(wire) == list(range(count))
    assert not wire.sent


@pytest.mark.parametrize("count", [-1, 2**24 + 1, 2**31 - 1])
def test_invalid_plan_count_is_refused_before_allocation(count: int) -> None:
    wire = Wire()
    wire.sent.append(torch.full((1024,), count, dtype=torch.int32))
    with pytest.raises(Broken, match=f"must have 0 to .* values, got {count}"):
        receive_numbers(wire)
    with pytest.raises(Broken):
        send_numbers(wire, range(2**24 + 1))
    assert not wire.sent


class StandIn:
    """Notes what it runs; `failure` is raised by each run."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.ran: list[RankStep] = []
        self.failure = failure
        self.info = SimpleNamespace(layers=3)

    def run(
        self,
        chunks: Sequence[StepChunk],
        copies: Sequence[tuple[int, int]],
        watch: StepTrace | None = None,
        *,
        moves: Sequence[TokenMove] = (),
    ) -> Tensor:
        self.ran.append(RankStep(tuple(chunks), tuple(copies), moves=tuple(moves)))
        if self.failure is not None:
            raise self.failure
        return torch.ones(1)

    def run_with_states(
        self,
        chunks: Sequence[StepChunk],
        copies: Sequence[tuple[int, int]],
        watch: StepTrace | None = None,
        *,
        moves: Sequence[TokenMove] = (),
    ) -> tuple[Tensor, Tensor]:
        return self.run(chunks, copies, watch, moves=moves), torch.zeros(2)


def model_of(stand_in: StandIn) -> CausalModel:
    return cast("CausalModel", stand_in)


def untold(watch: StepTrace) -> None:
    pytest.fail(f"no pass was traced, and this was heard: {watch}")


CHUNK = StepChunk(3, [5, 6], [0, 1], 1, parents=(-1, -1))
MOVE = TokenMove(2, 3, 2, 1)


def test_all_ranks_run_what_rank_0_runs_until_it_stops() -> None:
    wire, first, other = Wire(), StandIn(), StandIn()
    model = ShardedModel(model_of(first), wire, on_loss=lambda: pytest.fail("nothing was lost"))
    logits, _ = model.run_with_states([CHUNK], [(1, 2)], moves=[MOVE])
    assert logits.tolist() == [1.0]
    model.run_with_states([CHUNK])
    model.stop()
    follow(model_of(other), wire, untold)
    assert other.ran == first.ran == [RankStep((CHUNK,), ((1, 2),), moves=(MOVE,)), RankStep((CHUNK,), ())]


def test_rank_0_alone_reads_states_and_refuses_them_before_the_others_run() -> None:
    wire, first, other = Wire(), StandIn(), StandIn()
    model = ShardedModel(model_of(first), wire, on_loss=lambda: pytest.fail("nothing was lost"))
    with pytest.raises(Broken, match="feature_layers: must be in"):
        model.run_with_states([replace(CHUNK, feature_layers=(4,), feature_rows=2)])
    assert not wire.sent
    wanted = replace(CHUNK, feature_layers=(1, 3), feature_rows=2)
    _, states = model.run_with_states([wanted])
    model.stop()
    follow(model_of(other), wire, untold)
    assert states.tolist() == [0.0, 0.0]
    assert (first.ran[0].chunks, other.ran[0].chunks) == ((wanted,), (CHUNK,))


@pytest.mark.parametrize("watch", [None, StepTrace(bytes(range(24)))], ids=["untraced", "traced"])
def test_a_refused_pass_is_refused_by_all_and_the_next_one_runs(watch: StepTrace | None) -> None:
    wire, first, other = Wire(), StandIn(Broken("no")), StandIn(Broken("no"))
    model = ShardedModel(model_of(first), wire, on_loss=lambda: pytest.fail("nothing was lost"))
    for _ in range(2):
        with pytest.raises(Broken, match="no"):
            model.run_with_states([CHUNK], (), watch)
    model.stop()
    follow(model_of(other), wire, untold)
    assert len(other.ran) == 2


@pytest.mark.parametrize("failure", [RankLost("gone"), MemoryError()])
def test_after_a_loss_nothing_runs_any_more(failure: Exception) -> None:
    losses = threading.Semaphore(0)
    wire, first = Wire(), StandIn(failure)
    model = ShardedModel(model_of(first), wire, on_loss=losses.release)
    with pytest.raises(type(failure)):
        model.run_with_states([CHUNK])
    with pytest.raises(RankLost):
        model.run_with_states([CHUNK])
    model.stop()
    assert len(first.ran) == 1
    assert losses.acquire(blocking=False)
    assert not losses.acquire(blocking=False), "it was told twice"
    with pytest.raises(RankLost):
        follow(model_of(StandIn(failure)), cast("Any", Wire()), untold)
