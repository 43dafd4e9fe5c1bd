"""Steps on several threads: the same bits in both ways to run them, and the quicker way is taken."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from galley.core.step import StepChunk
from galley.engine.cpu.llama import LlamaForward
from galley.engine.cpu.threaded import ThreadedForward, divide
from galley.engine.cpu.trials import Trials
from galley.engine.model import CausalModel
from galley.engine.pages import Span
from tests.fakes.model_configs import CONFIGS, load
from tests.integration.services.target.invariance import InvarianceTrial

MakeModel = Callable[[Any], Path]
SESSIONS = 8


def decoding(count: int, start: int = 200) -> list[Span]:
    return [Span(start, 1, [0]) for _ in range(count)]


@pytest.mark.parametrize(
    ("spans", "parts", "edges"),
    [
        (decoding(8), 2, [0, 4, 8]),
        (decoding(7), 2, [0, 4, 7]),
        (decoding(16), 4, [0, 4, 8, 12, 16]),
        (decoding(8), 4, [0, 4, 8]),
        # Four sessions that verify three draft tokens each.
        ([Span(200, 4, [0])] * 4, 2, [0, 2, 4]),
        # A row with a long context is more work.
        ([Span(7000, 1, [0]), *decoding(7)], 2, [0, 1, 8]),
        (decoding(5), 2, [0, 5]),
        ([Span(0, 200, [0])], 2, [0, 1]),
        ([*decoding(8), Span(0, 200, [0])], 2, [0, 9]),
        ([Span(0, 200, [0]), *decoding(8)], 2, [0, 9]),
    ],
)
def test_a_step_is_divided_between_sessions_of_equal_work(
    spans: Sequence[Span], parts: int, edges: list[int]
) -> None:
    assert divide(spans, parts) == edges


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Return the thread, torch's threads in it, and the sessions of each part that ran."""
    runs: list[tuple[str, int, int]] = []
    run = LlamaForward.run

    def recorded(self: LlamaForward, spans: Sequence[Span], *rest: Any) -> Tensor:
        runs.append((threading.current_thread().name, torch.get_num_threads(), len(spans)))
        return run(self, spans, *rest)

    monkeypatch.setattr(LlamaForward, "run", recorded)
    return runs


@pytest.fixture
def threaded(make_model: MakeModel) -> Iterator[CausalModel]:
    """Yield a model on two threads."""
    directory, before = make_model(CONFIGS["llama"]()), torch.get_num_threads()
    yield CausalModel.load(directory, dtype=torch.bfloat16, device="cpu", threads=2, kv_blocks=64)
    torch.set_num_threads(before)


def chunks(count: int, token: int = 3) -> list[StepChunk]:
    return [StepChunk(0, [token + i, 5, 8], [i], 2) for i in range(count)]


def test_parts_run_side_by_side_each_on_a_thread_of_its_own(
    threaded: CausalModel, ran: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [threaded.run([chunk]) for chunk in chunks(SESSIONS)]
    ran.clear()
    run, both = LlamaForward.run, threading.Barrier(2)

    def meeting(*part: Any) -> Tensor:
        both.wait(20)
        return run(*part)

    monkeypatch.setattr(LlamaForward, "run", meeting)
    together = threaded.run(chunks(SESSIONS))
    assert sorted(ran) == [("part_0", 1, SESSIONS // 2), ("part_1", 1, SESSIONS // 2)]
    assert torch.equal(together, torch.cat(alone))


def test_sessions_without_logits_have_no_rows_in_the_result(threaded: CausalModel) -> None:
    mixed = [
        StepChunk(chunk.start, chunk.tokens, chunk.blocks, i % 3) for i, chunk in enumerate(chunks(SESSIONS))
    ]
    alone = torch.cat([threaded.run([chunk]) for chunk in mixed])
    assert len(alone) == sum(chunk.want_logits for chunk in mixed)
    assert torch.equal(threaded.run(mixed), alone)
    silent = [StepChunk(chunk.start, chunk.tokens, chunk.blocks, 0) for chunk in mixed]
    assert threaded.run(silent).shape == (0, threaded.info.vocab_size)


def test_a_step_ends_when_its_last_part_ends_though_another_fails(
    threaded: CausalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, failed, ended = LlamaForward.run, threading.Event(), threading.Event()

    def failing(self: LlamaForward, spans: Sequence[Span], *rest: Any) -> Tensor:
        if spans[0].blocks[0] == 0:
            failed.set()
            raise ZeroDivisionError
        assert failed.wait(20)
        try:
            return run(self, spans, *rest)
        finally:
            ended.set()

    monkeypatch.setattr(LlamaForward, "run", failing)
    with pytest.raises(ZeroDivisionError):
        threaded.run(chunks(SESSIONS))
    assert ended.is_set()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_no_bit_depends_on_how_a_step_is_run(
    kind: str, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, ran: list[tuple[str, int, int]]
) -> None:
    ways = random.Random(18)
    monkeypatch.setattr(Trials, "choose", lambda _: ways.randrange(2))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    model = load(make_model(CONFIGS[kind]()), torch.bfloat16, kv_blocks=64)
    trial = InvarianceTrial(model, sequences=9, longest=60, seed=17)
    ran.clear()
    counts = trial.run(60)
    assert counts.differing == 0, counts.first_difference
    in_parts = sum(thread.startswith("part") for thread, _, _ in ran)
    assert in_parts > 40
    assert len(ran) - in_parts > 20


@pytest.mark.parametrize(("sessions", "parts"), [(1, 0), (SESSIONS, 0), (3 * SESSIONS, 8)])
def test_parts_that_would_leave_most_threads_idle_are_not_tried(
    sessions: int, parts: int, make_model: MakeModel, ran: list[tuple[str, int, int]]
) -> None:
    model = load(make_model(CONFIGS["llama"]()), kv_blocks=64)
    assert isinstance(model._forward, LlamaForward)
    model._forward = ThreadedForward(model._forward, 16)
    ran.clear()
    model.run([StepChunk(0, [5], [i], 1) for i in range(sessions)])
    assert sum(thread.startswith("part") for thread, _, _ in ran) == parts
    assert len(ran) == (parts or 1)


@pytest.mark.parametrize(
    ("rows", "part_ns", "whole_ns", "taken"),
    [
        (1, 30, 10, "MainThread"),
        (1, 10, 30, "part_0"),
        # The other core is for the draft of a single stream; a prompt has all.
        (1, 13, 10, "part_0"),
        (40, 13, 10, "MainThread"),
    ],
)
def test_the_quicker_way_is_taken(
    rows: int,
    part_ns: int,
    whole_ns: int,
    taken: str,
    make_model: MakeModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load(make_model(CONFIGS["llama"]()), kv_blocks=64)
    threads: list[str] = []
    now = 0

    def timed(self: LlamaForward, spans: Sequence[Span], *rest: Any) -> Tensor:
        nonlocal now
        threads.append(threading.current_thread().name)
        now += part_ns if threads[-1].startswith("part") else whole_ns
        return run(self, spans, *rest)

    run = LlamaForward.run
    monkeypatch.setattr(LlamaForward, "run", timed)
    assert isinstance(model._forward, LlamaForward)
    model._forward = ThreadedForward(model._forward, 2, clock=lambda: now)
    for _ in range(9):
        model.run([StepChunk(0, [5] * rows, [0, 1], 1)])
    assert threads[:2] == ["part_0", "MainThread"]
    assert threads[2:] == [taken] * 7
