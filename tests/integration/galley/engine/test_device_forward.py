"""Passes filled up to few shapes, recorded and played again: stand-ins for the device, on the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from galley.core.kv.blocks import BLOCK_TOKENS
from galley.core.step import StepChunk
from galley.engine.cuda import flex_layout
from galley.engine.cuda.flex import FlexAttention, attend_by
from galley.engine.cuda.graphs import Graphs
from galley.engine.forward import DeviceForward, Shapes, TransformersForward
from galley.engine.kv_shape import kv_shape
from galley.engine.load.module import load_config, load_module
from galley.engine.model import CausalModel, ModelInfo, probe_logits
from galley.engine.pages import FlatPool, Span
from tests.fakes.model_configs import CONFIGS, VOCAB, load, tokens_of
from tests.fakes.random_trees import tree_around
from tests.integration.galley.engine.flex_standin import kernel

CPU = torch.device("cpu")
BLOCKS = 40
KINDS = ("gemma2", "gpt2")


class Again:
    def __init__(self) -> None:
        self.recorded = 0
        self.played = 0

    def record(self, body: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.recorded += 1
        result = body()

        def play() -> Tensor:
            self.played += 1
            result.copy_(body())
            return result

        return play


def _model(
    directory: Path, shapes: Shapes | None, graphs: Graphs | None = None, max_rows: int = 512
) -> CausalModel:
    config = load_config(directory)
    pool = FlatPool(kv_shape(config, torch.float32), BLOCKS, CPU)
    module = load_module(directory, config, dtype=torch.float32, device="cpu").module
    fixed = shapes is not None and shapes.fixed is not None
    attend = partial(attend_by, kernel)
    attention = FlexAttention(pool, config.num_attention_heads, fixed=fixed, attend=attend)
    info = ModelInfo(
        "m", directory, config.max_position_embeddings, VOCAB, (), "float32", "cpu", "", deterministic=False
    )
    if shapes is None:
        return CausalModel(TransformersForward(module, attention), info)
    return CausalModel(DeviceForward(module, attention, shapes, graphs), info, max_rows=max_rows)


def _run(model: CausalModel, steps: int = 24) -> list[Tensor]:
    rng = random.Random(5)
    lengths, blocks = [0] * 5, [list(range(6 * i, 6 * i + 6)) for i in range(5)]
    answers = []
    for step in range(steps):
        chosen = rng.sample(range(5), rng.randint(1, 5))
        chunks = []
        for i in chosen:
            rows = 40 if step % 11 == 0 else rng.choice([1, 1, 3, 5])
            lengths[i] = 0 if lengths[i] + rows > 6 * BLOCK_TOKENS else lengths[i]
            logit_rows = 0 if step % 5 == 1 else rng.choice([1, rows])
            chunks.append(StepChunk(lengths[i], tokens_of(rng, rows), blocks[i], logit_rows))
            lengths[i] += rows
        answers.append(model.run(chunks))
    return answers


def _same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for own, their in zip(ours, theirs, strict=True):
        assert own.shape == their.shape
        torch.testing.assert_close(own, their, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_padded_and_replayed_steps_equal_plain_ones(kind: str, make_model: Callable[[Any], Path]) -> None:
    directory = make_model(CONFIGS[kind]())
    plain = _run(_model(directory, None))
    recorder = Again()
    graphs = Graphs(recorder, CPU, max_kept=3, record_at=2)
    listed = _run(_model(directory, Shapes((2, 4, 8, 16, 32)), graphs))
    _same(listed, plain)
    assert recorder.recorded > 3
    assert recorder.played > recorder.recorded, "a recording is of use again"
    assert len(graphs) == 3, "and not too many are kept"
    fixed = _model(directory, Shapes(fixed=32), Graphs(Again(), CPU, record_at=1), max_rows=32)
    _same(_run(fixed, steps=12), plain[:12])


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
def test_the_model_equals_the_cpus_own_attention(kind: str, make_model: Callable[[Any], Path]) -> None:
    directory = make_model(CONFIGS[kind]())
    device = _model(directory, Shapes(), Graphs(Again(), CPU, record_at=1))
    torch.testing.assert_close(probe_logits(device), probe_logits(load(directory)), atol=2e-4, rtol=2e-4)
    assert (device.attention_kind, device.forward_kind) == ("FlexAttention", "transformers")


@pytest.mark.parametrize("kind", KINDS)
def test_trees_have_the_logits_of_the_cpus_own_attention(
    kind: str, make_model: Callable[[Any], Path]
) -> None:
    directory = make_model(CONFIGS[kind]())
    models = _model(directory, Shapes((8, 32)), Graphs(Again(), CPU, record_at=1)), load(directory)
    rng = random.Random(8)
    for nodes in (3, 25, 12):
        prefix, tree = tokens_of(rng, 45), tree_around(rng, [], tokens_of(rng, nodes))
        steps = [
            [StepChunk(0, prefix, [3, 1, 8], 0), StepChunk(0, [7], [9], 0)],
            [StepChunk(45, tree.tokens[:2], [3, 1, 8], 2, parents=tree.parents[:2])],
            [StepChunk(1, [5], [9], 1), StepChunk(47, tree.tokens[2:], [3, 1, 8], 1, parents=tree.parents)],
            [StepChunk(2, [5], [9], 1), StepChunk(45, tree.tokens, [3, 1, 8], nodes, parents=tree.parents)],
        ]
        ours, theirs = ([model.run(chunks) for chunks in steps] for model in models)
        _same(ours, theirs)


def test_logits_of_one_step_outlive_the_next(make_model: Callable[[Any], Path]) -> None:
    model = _model(make_model(CONFIGS["llama"]()), Shapes(), Graphs(Again(), CPU, record_at=1))
    first = model.run([StepChunk(0, [1, 2, 3, 4], [0], 4)])
    kept = first.clone()
    second = model.run([StepChunk(0, [9, 8, 7, 6], [1], 4)])
    assert torch.equal(first, kept)
    assert not torch.equal(first, second)


class Unable:
    def __init__(self) -> None:
        self.attempts = 0

    def record(self, body: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.attempts += 1
        raise RuntimeError("operation not permitted when stream is capturing")


def test_a_step_that_cannot_be_recorded_runs_unrecorded() -> None:
    recorder = Unable()
    graphs = Graphs(recorder, CPU, record_at=2)
    for number in range(6):
        packed = torch.full((3,), number, dtype=torch.int32)
        assert torch.equal(graphs.run("shape", [packed], lambda buffer: buffer + 1), packed + 1)
    assert recorder.attempts == 1, "it is not tried again"
    assert len(graphs) == 0


def test_recordings_are_kept_by_the_bytes_of_their_results() -> None:
    recorder = Again()
    graphs = Graphs(recorder, CPU, max_bytes=100, record_at=1)

    def play(name: str, numbers: int) -> None:
        graphs.run(name, [torch.zeros(numbers, dtype=torch.int32)], lambda buffer: buffer + 1)

    for name, numbers, kept in (("a", 10, 1), ("b", 10, 2), ("a", 10, 2), ("c", 10, 2), ("d", 50, 1)):
        play(name, numbers)
        assert len(graphs) == kept, name
    before = recorder.recorded
    play("d", 50)
    assert recorder.recorded == before, "one that is too large alone is kept"


def test_invariant_steps_have_one_shape(make_model: Callable[[Any], Path]) -> None:
    seen = set()

    class Watched(Shapes):
        def of(self, *arguments: Any) -> flex_layout.StepShape | None:
            shape = super().of(*arguments)
            seen.add(shape)
            return shape

    model = _model(make_model(CONFIGS["llama"]()), Watched(fixed=16), max_rows=16)
    rng = random.Random(6)
    for rows in (1, 5, 16, 50):
        model.run([StepChunk(0, tokens_of(rng, rows), [0, 1], rows), StepChunk(0, tokens_of(rng, 2), [2], 1)])
    assert len(seen) == 1
    with pytest.raises(ValueError, match="got 17"):
        Shapes(fixed=16).of(model._forward.attention.lay_out([Span(0, 17, [0])]), 1, 16)


def test_a_padded_shape_holds_its_step() -> None:
    attention = FlexAttention(FlatPool(kv_shape(CONFIGS["llama"](), torch.float32), 9, CPU), 4)
    shapes = Shapes((4, 16))
    for spans, logit_rows, rows in (([Span(0, 3, [0])], 2, 4), ([Span(0, 5, [0]), Span(9, 1, [1])], 6, 16)):
        pages = attention.lay_out(spans)
        shape = shapes.of(pages, logit_rows, 16)
        assert shape is not None
        assert (shape.rows, shape.slots) == (rows, 16)
        assert shape.logit_rows >= logit_rows
        assert shape.tiles > len(pages.tiles), "one for the rows that only fill up"
    assert shapes.of(attention.lay_out([Span(0, 17, [0])]), 1, 16) is None
