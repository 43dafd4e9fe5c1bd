"""States that leave a forward pass, and additions that enter it: of all ways to run one."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from galley.core.errors import Broken
from galley.core.step import StepChunk
from galley.engine.cuda.flex import FlexAttention, attend_by
from galley.engine.cuda.graphs import Graphs
from galley.engine.forward import DeviceForward, Shapes
from galley.engine.kv_shape import kv_shape
from galley.engine.load.module import load_config, load_module
from galley.engine.model import CausalModel, ModelInfo, Rows
from galley.engine.pages import FlatPool
from tests.fakes.model_configs import CONFIGS, VOCAB, load, tokens_of
from tests.integration.galley.engine.flex_standin import kernel
from tests.integration.galley.engine.test_device_forward import Again

MakeModel = Callable[[Any], Path]
LAYERS = (1, 2, 3)
CPU = torch.device("cpu")


@torch.inference_mode()
def theirs(directory: Path, tokens: list[int], added: Tensor | None = None) -> Tensor:
    """Return transformers' states [tokens, 3, hidden], the last from before the final norm."""
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    last: list[Tensor] = []
    names = ("norm", "ln_f", "final_layer_norm")
    norm: Any = next(getattr(model.base_model, name) for name in names if hasattr(model.base_model, name))
    norm.register_forward_pre_hook(lambda _module, inputs: last.append(inputs[0][0]))
    embedded = model.get_input_embeddings()(torch.tensor([tokens]))
    if added is not None:
        embedded += added
    hidden = model(inputs_embeds=embedded, use_cache=False, output_hidden_states=True).hidden_states
    return torch.stack([hidden[1][0], hidden[2][0], last[0]], 1)


def whole(model: CausalModel, tokens: list[int], layers: tuple[int, ...] = LAYERS) -> tuple[Tensor, Tensor]:
    return model.forward_states([Rows(model.new_cache(), tokens, len(tokens))], layers)


@pytest.mark.parametrize("kind", CONFIGS)
def test_states_of_each_family_are_those_of_transformers(kind: str, make_model: MakeModel) -> None:
    directory = make_model(CONFIGS[kind]())
    model, prompt = load(directory), tokens_of(random.Random(2), 70)
    logits, states = whole(model, prompt)
    assert (model.info.layers, model.info.hidden_size) == (3, 64)
    torch.testing.assert_close(states, theirs(directory, prompt), atol=2e-4, rtol=2e-4)
    assert torch.equal(logits, whole(model, prompt, ())[0])
    assert torch.equal(whole(model, prompt, (2,))[1][:, 0], states[:, 1])


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_what_is_added_to_embeddings_passes_all_layers(kind: str, make_model: MakeModel) -> None:
    directory = make_model(CONFIGS[kind]())
    model, prompt = load(directory), tokens_of(random.Random(3), 12)
    added = torch.randn(12, 64, generator=torch.Generator().manual_seed(1))
    cache, other = model.new_cache(), model.new_cache()
    plain, _ = whole(model, prompt)
    rows = [Rows(other, prompt, 12), Rows(cache, prompt[:7], 7, added=added[:7])]
    logits, states = model.forward_states(rows, LAYERS)
    _, later = model.forward_states([Rows(cache, prompt[7:], 5, added=added[7:])], LAYERS)
    assert torch.equal(logits[:12], plain)
    ours = torch.cat([states[12:], later])
    torch.testing.assert_close(ours, theirs(directory, prompt, added), atol=2e-4, rtol=2e-4)
    with pytest.raises(Broken, match="added: must have 2 rows, got 3"):
        model.forward([Rows(cache, [1, 2], 1, added=added[:3])])


def chunks_of(prompts: list[list[int]], layers: list[tuple[int, ...]], rows: list[int]) -> list[StepChunk]:
    return [
        StepChunk(0, prompt, list(range(4 * i, 4 * i + 4)), 2, feature_layers=own, feature_rows=count)
        for i, (prompt, own, count) in enumerate(zip(prompts, layers, rows, strict=True))
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_of_a_mixed_step_keep_the_bits_of_each_alone(
    dtype: torch.dtype, make_model: MakeModel
) -> None:
    directory, rng = make_model(CONFIGS["llama"]()), random.Random(4)
    model = load(directory, dtype)
    model.max_rows = 32  # the step is cut
    prompts = [tokens_of(rng, count) for count in (20, 3, 50, 9)]
    asked: list[tuple[int, ...]] = [(3,), (), (1, 3), (2,)]
    chunks = chunks_of(prompts, asked, [20, 3, 45, 2])
    logits, states = model.run_with_states(chunks)
    assert states.shape == (67, 3, 64)
    alone = torch.cat([whole(model, prompt)[1][-count:] for prompt, count in wanted(prompts)])
    assert torch.equal(states.float(), alone)
    assert torch.equal(logits, model.run(chunks_of(prompts, [()] * 4, [0] * 4)))


def wanted(prompts: list[list[int]]) -> list[tuple[list[int], int]]:
    return [(prompts[0], 20), (prompts[2], 45), (prompts[3], 2)]


def test_states_are_the_same_on_threads_of_their_own(make_model: MakeModel) -> None:
    directory, before = make_model(CONFIGS["llama"]()), torch.get_num_threads()
    prompts = [[3 + i, 5, 8, 13] for i in range(8)]
    chunks = chunks_of(prompts, [(1, 3)] * 8, [4, 2, 3, 4, 2, 2, 3, 4])
    one = load(directory, torch.bfloat16).run_with_states(chunks)
    try:
        model = CausalModel.load(directory, dtype=torch.bfloat16, device="cpu", threads=2, kv_blocks=64)
        for _ in range(4):  # both ways to run a step are tried
            assert all(map(torch.equal, model.run_with_states(chunks), one))
    finally:
        torch.set_num_threads(before)


def test_states_of_nodes_are_those_of_their_paths(make_model: MakeModel) -> None:
    model = load(make_model(CONFIGS["llama"]()))
    cache = model.new_cache()
    model.forward([Rows(cache, [5, 6, 7], 0)])
    # 7 -> 10 -> 20, and 7 -> 11 -> 21
    _, states = model.forward_states([Rows(cache, [10, 11, 20, 21], 4, (-1, -1, 0, 1))], LAYERS)
    for path, nodes in (([10, 20], [0, 2]), ([11, 21], [1, 3])):
        assert torch.equal(states[nodes], whole(model, [5, 6, 7, *path])[1][3:])


@pytest.mark.parametrize("kind", ["gemma2", "gpt2"])
def test_states_of_a_recorded_step_are_those_of_a_plain_one(kind: str, make_model: MakeModel) -> None:
    directory, rng = make_model(CONFIGS[kind]()), random.Random(6)
    recorder, plain = Again(), load(directory)
    model = on_device(directory, Graphs(recorder, CPU, record_at=1))
    for step in range(3):
        prompts = [tokens_of(rng, count) for count in (5, 3)]
        chunks = chunks_of(prompts, [(2, 3), ()], [5, 0])
        for ours, reference in zip(model.run_with_states(chunks), plain.run_with_states(chunks), strict=True):
            torch.testing.assert_close(ours, reference, atol=2e-4, rtol=2e-4)
        assert (recorder.recorded, recorder.played) == (1, step + 1)
    without_logits = [StepChunk(0, [1, 2, 3], [0], 0, feature_layers=(1,), feature_rows=3)]
    logits, states = model.run_with_states(without_logits)
    assert len(logits) == 0
    torch.testing.assert_close(states, plain.run_with_states(without_logits)[1], atol=2e-4, rtol=2e-4)
    for size in range(3):
        added = torch.full((4, 64), float(size))
        ours, other = (
            one.forward_states([Rows(one.new_cache(), [1, 2, 3, 4], 4, added=added)], (3,))[1]
            for one in (model, plain)
        )
        torch.testing.assert_close(ours, other, atol=2e-4, rtol=2e-4)
    assert recorder.recorded == 3


def on_device(directory: Path, graphs: Graphs) -> CausalModel:
    config = load_config(directory)
    pool = FlatPool(kv_shape(config, torch.float32), 40, CPU)
    module = load_module(directory, config, dtype=torch.float32, device="cpu").module
    attention = FlexAttention(pool, config.num_attention_heads, attend=partial(attend_by, kernel))
    info = ModelInfo(
        "m", directory, 1024, VOCAB, (), "float32", "cpu", "", deterministic=False, layers=3, hidden_size=64
    )
    return CausalModel(DeviceForward(module, attention, Shapes(), graphs), info)


@pytest.mark.parametrize(
    ("layers", "rows", "message"),
    [
        ((0,), 2, "feature_layers: must be in \\[1, 3\\], got 0"),
        ((1, 4), 2, "feature_layers: must be in \\[1, 3\\], got 1, 4"),
        ((1,), 1, "feature_rows: must be in \\[2, 3\\], got 1"),
        ((1,), 4, "feature_rows: must be in \\[2, 3\\], got 4"),
    ],
)
def test_states_that_a_model_does_not_have_are_refused(
    layers: tuple[int, ...], rows: int, message: str, make_model: MakeModel
) -> None:
    model = load(make_model(CONFIGS["llama"]()))
    with pytest.raises(Broken, match=message):
        model.run_with_states(chunks_of([[1, 2, 3]], [layers], [rows]))
