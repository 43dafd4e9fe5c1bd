"""The pool, its pages, and attention over them: `CausalModel.run` as a scheduler uses it."""

from __future__ import annotations

import asyncio
import gc
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from galley.common.server.process import in_passing_thread
from galley.core.errors import Broken, Overloaded
from galley.core.kv.blocks import BLOCK_TOKENS
from galley.core.step import StepChunk
from galley.engine import paged
from galley.engine.cpu import llama
from galley.engine.cpu.kernels import openmp, ops
from galley.engine.cpu.kernels.compile import compile_kernels
from galley.engine.kv_shape import kv_shape
from galley.engine.model import Rows
from galley.engine.paged import CompiledAttention, TorchAttention
from galley.engine.pages import KvPool, KvShape, Shape, Span
from tests.fakes.model_configs import CONFIGS, VOCAB, load, tokens_of, whole
from tests.fakes.random_trees import tree_around
from tests.integration.services.target.invariance import InvarianceTrial

MakeModel = Callable[[Any], Path]

BLOCKS = 64


def _filled(shape: KvShape, blocks: int, generator: torch.Generator) -> KvPool:
    pool = KvPool(shape, blocks, torch.device("cpu"))
    for part in (pool.keys, pool.values):
        part.copy_(torch.randn(part.shape, generator=generator))
    return pool


def _attend(kind: Any, case: dict[str, Any], *, company: bool, seed: int = 0) -> torch.Tensor:
    kv_heads, group, dim = case["kv_heads"], case["group"], case["dim"]
    generator = torch.Generator().manual_seed(seed)
    pool = _filled(KvShape(2, kv_heads, dim, dim, case["dtype"]), 16, generator)
    attention: paged.Attention = kind(pool, kv_heads * group, 16 * BLOCK_TOKENS)
    nodes = min(case["nodes"], case["start"] + case["rows"])
    parents = tree_around(random.Random(seed), [], [0] * nodes).parents
    span = Span(case["start"], case["rows"], [7, 3, 11, 2, 5, 14, 1, 9], parents)
    other = Span(33, 9, [0, 4])
    query = torch.randn(case["rows"], kv_heads * group, dim, generator=generator).to(case["dtype"])
    key, value = (
        torch.randn(case["rows"], kv_heads, dim, generator=generator).to(case["dtype"]) for _ in "kv"
    )
    shape = Shape(0.3, case["window"], case["softcap"])
    if not company:
        return attention.store_attend(attention.lay_out([span]), 1, query, key, value, shape)
    rows = [
        torch.cat([torch.full((9, *part.shape[1:]), torch.nan).to(part), part])
        for part in (query, key, value)
    ]
    pages = attention.lay_out([other, span])
    mixed = attention.store_attend(pages, 1, rows[0], rows[1], rows[2], shape)
    assert mixed[:9].isnan().all()
    return mixed[9:]


def _torch(pool: KvPool, heads: int, context: int) -> TorchAttention:
    return TorchAttention(pool, heads)


CASES = st.fixed_dictionaries(
    {
        "kv_heads": st.sampled_from([1, 2, 3]),
        "group": st.sampled_from([1, 2, 3, 7]),
        "dim": st.sampled_from([8, 32, 48, 64]),
        "rows": st.integers(1, 60),
        "start": st.integers(0, 150),
        "nodes": st.sampled_from([0, 0, 5, 24, 70]),
        "window": st.sampled_from([None, 1, 5, 32, 70]),
        "softcap": st.sampled_from([None, 2.0]),
        "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
    }
)


@settings(max_examples=40)
@given(CASES)
def test_the_kernel_equals_torch_alone_and_in_a_batch(case: dict[str, Any]) -> None:
    ours = _attend(CompiledAttention, case, company=False)
    theirs = _attend(_torch, case, company=False)
    tolerance = 1e-5 if case["dtype"] == torch.float32 else 2e-2
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
    assert torch.equal(ours, _attend(CompiledAttention, case, company=True))


def test_more_threads_change_no_bit_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    case = {
        "kv_heads": 3, "group": 3, "dim": 64, "rows": 60, "start": 100, "nodes": 40,
        "window": None, "softcap": None, "dtype": torch.bfloat16,
    }  # fmt: skip
    alone = _attend(CompiledAttention, case, company=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(openmp, "_WORTH_NS", 0)
    assert torch.equal(alone, _attend(CompiledAttention, case, company=False))


def test_later_rows_and_stale_blocks_do_not_reach_a_row() -> None:
    generator = torch.Generator().manual_seed(1)
    pool = _filled(KvShape(1, 1, 16, 16, torch.float32), 4, generator)
    attention = CompiledAttention(pool, 2, 128)
    query, key, value = (torch.randn(6, heads, 16, generator=generator) for heads in (2, 1, 1))

    def first_rows() -> torch.Tensor:
        return attention.store_attend(
            attention.lay_out([Span(30, 6, [2, 0])]), 0, query, key, value, Shape(1.0)
        )[:3]

    clean = first_rows()
    for part in (query, key, value):
        part[3:] = torch.nan
    pool.keys[0, 0] = torch.nan
    pool.values[0, 0] = torch.nan
    assert torch.equal(first_rows(), clean)


def test_a_pool_is_as_large_as_its_blocks() -> None:
    config = CONFIGS["llama"]()
    pool = KvPool(kv_shape(config, torch.bfloat16), 7, torch.device("cpu"))
    assert pool.nbytes == 7 * pool.block_bytes
    # Head size 16: values take whole vectors of 32.
    assert pool.block_bytes == 3 * 2 * BLOCK_TOKENS * (16 + 32) * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma2", "gpt2"])
def test_no_bit_depends_on_blocks_chunks_or_batches(
    kind: str, dtype: torch.dtype, make_model: MakeModel
) -> None:
    model = load(make_model(CONFIGS[kind]()), dtype, kv_blocks=BLOCKS)
    assert model.info.deterministic
    trial = InvarianceTrial(model, sequences=4, longest=170, seed=11)
    model.kv.keys.fill_(torch.nan)
    model.kv.values.fill_(torch.nan)
    counts = trial.run(80)
    assert counts.differing == 0, counts.first_difference
    assert counts.rows > 500
    assert min(counts.evictions, counts.copied_blocks, counts.drafts_fed, counts.moved_tokens) > 0


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_a_row_that_is_not_finite_stays_alone(kind: str, make_model: MakeModel) -> None:
    directory = make_model(CONFIGS[kind]())
    auto: Any = transformers.AutoModelForCausalLM
    poisoned = auto.from_pretrained(directory)
    poisoned.get_input_embeddings().weight.data[VOCAB - 1] = torch.nan
    poisoned.save_pretrained(directory)
    model = load(directory, kv_blocks=BLOCKS)
    prompt = [1, 2, 3, 4, 5]
    expected = model.run([StepChunk(0, prompt, [0], 5)])
    got = model.run([StepChunk(0, [VOCAB - 1, 2], [1], 2), StepChunk(0, [*prompt, VOCAB - 1], [2], 6)])
    assert got[:2].isnan().all()
    assert torch.equal(got[2:7], expected)
    assert got[7].isnan().all()


def test_chunks_out_of_bounds_are_refused_before_any_work(make_model: MakeModel) -> None:
    model = load(make_model(CONFIGS["llama"]()), kv_blocks=BLOCKS)
    model.kv.keys.zero_()
    good = StepChunk(0, [1], [0], 1)
    for chunks, copies in (
        ([good, StepChunk(0, [1, 2], [1], 3)], []),
        ([good, StepChunk(0, [VOCAB], [1], 1)], []),
        ([good, StepChunk(1024, [1], list(range(33)), 1)], []),
        ([good, StepChunk(-1, [1], [1], 1)], []),
        ([good, StepChunk(31, [1, 2], [1], 1)], []),
        ([good, StepChunk(0, [1], [BLOCKS], 1)], []),
        ([good, StepChunk(0, [1], [-1], 1)], []),
        ([good], [(0, BLOCKS)]),
    ):
        with pytest.raises(Broken):
            model.run(chunks, copies)
    assert not model.kv.keys.any()
    assert model.run([]).shape == (0, VOCAB)


def test_caches_share_the_blocks_and_give_them_back(make_model: MakeModel) -> None:
    model = load(make_model(CONFIGS["llama"]()), kv_blocks=8)
    tokens = tokens_of(random.Random(12), 7 * BLOCK_TOKENS)
    expected = whole(model, tokens)
    gc.collect()
    first, second = model.new_cache(), model.new_cache()
    model.forward([Rows(first, tokens, 0)])
    with pytest.raises(Overloaded):
        model.forward([Rows(first, [1], 1), Rows(second, [1] * (BLOCK_TOKENS + 1), 1)])
    assert (len(first.tokens), len(second.tokens)) == (len(tokens), 0)
    first.truncate(3 * BLOCK_TOKENS + 1)
    model.forward([Rows(second, tokens[: 4 * BLOCK_TOKENS], 0)])
    del second
    gc.collect()
    (logits,) = model.forward([Rows(first, tokens[len(first.tokens) :], 1)])
    assert torch.equal(logits, expected[-1:])


FAMILY: dict[str, Callable[[], Any]] = {
    "llama": CONFIGS["llama"],
    "llama with biases": lambda: transformers.LlamaConfig(
        **CONFIGS["llama"]().to_diff_dict() | {"attention_bias": True, "mlp_bias": True}
    ),
    "llama, tied": lambda: transformers.LlamaConfig(
        **CONFIGS["llama"]().to_diff_dict() | {"tie_word_embeddings": True, "num_key_value_heads": 4}
    ),
    "llama 3": lambda: transformers.LlamaConfig(
        **CONFIGS["llama"]().to_diff_dict()
        | {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            }
        }
    ),
    "llama, heads of 24": lambda: transformers.LlamaConfig(
        **CONFIGS["llama"]().to_diff_dict() | {"head_dim": 24, "num_key_value_heads": 1}
    ),
    "llama, yarn": lambda: transformers.LlamaConfig(
        **CONFIGS["llama"]().to_diff_dict()
        | {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        }
    ),
    "llama that names a window": lambda: transformers.LlamaConfig(
        **CONFIGS["llama"]().to_diff_dict() | {"sliding_window": 11}
    ),
    "mistral": CONFIGS["mistral"],
    "mistral, no window": lambda: transformers.MistralConfig(
        **CONFIGS["mistral"]().to_diff_dict() | {"sliding_window": None}
    ),
    "qwen2": lambda: transformers.Qwen2Config(
        **CONFIGS["qwen2"]().to_diff_dict()
        | {"use_sliding_window": True, "sliding_window": 29, "max_window_layers": 1, "layer_types": None}
    ),
    "qwen3": CONFIGS["qwen3"],
    "qwen3, wide heads": lambda: transformers.Qwen3Config(
        **CONFIGS["qwen3"]().to_diff_dict() | {"head_dim": 48, "attention_bias": True}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILY)
def test_our_own_forward_gives_the_logits_of_transformers(
    name: str, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_model(FAMILY[name]())
    tokens = tokens_of(random.Random(13), 90)
    ours = load(directory, kv_blocks=BLOCKS), load(directory, torch.bfloat16, kv_blocks=BLOCKS)
    monkeypatch.setattr(llama, "can_serve", lambda module, pool: False)
    theirs = load(directory, kv_blocks=BLOCKS)
    assert (ours[0].forward_kind, theirs.forward_kind) == ("own", "transformers")
    expected = whole(theirs, tokens)
    torch.testing.assert_close(whole(ours[0], tokens), expected, atol=2e-4, rtol=2e-4)
    rough = whole(ours[1], tokens)
    assert float((rough - expected).norm() / expected.norm()) < 0.1


def test_more_threads_change_no_bit_of_our_own_forward(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, tokens = make_model(CONFIGS["qwen3"]()), tokens_of(random.Random(15), 90)
    expected = whole(load(directory, torch.bfloat16, kv_blocks=BLOCKS), tokens)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(openmp, "_WORTH_NS", 0)
    assert torch.equal(whole(load(directory, torch.bfloat16, kv_blocks=BLOCKS), tokens), expected)


async def test_loading_in_a_passing_thread_leaves_no_openmp_threads(make_model: MakeModel) -> None:
    """A second OpenMP team would keep both from spinning."""
    directory = make_model(CONFIGS["llama"]())
    before = len(_tasks())
    during = await in_passing_thread(_load_and_multiply, directory)
    assert len(during) > before + 1, "no team was there that could be left"
    async with asyncio.timeout(10):
        while True:
            if len(_tasks()) <= before:
                break
            await asyncio.sleep(0.01)


def _load_and_multiply(directory: Path) -> list[Path]:
    load(directory, kv_blocks=BLOCKS)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.randn(512, 512) @ torch.randn(512, 512)
    torch.set_num_threads(threads)
    return _tasks()


def _tasks() -> list[Path]:
    return list(Path("/proc/self/task").iterdir())


def test_torch_attention_equals_the_kernels(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_model(CONFIGS["gemma2"]())
    tokens = tokens_of(random.Random(14), 90)
    expected = whole(load(directory, kv_blocks=BLOCKS), tokens)
    monkeypatch.setattr(
        "galley.engine.forward.attention_for",
        lambda pool, heads, device, context, **_: TorchAttention(pool, heads),
    )
    plain = load(directory, kv_blocks=BLOCKS)
    assert plain.attention_kind == "TorchAttention"
    torch.testing.assert_close(whole(plain, tokens), expected, atol=2e-4, rtol=2e-4)


def double(numbers: Any) -> None:
    for i in range(len(numbers)):
        numbers[i] += numbers[i]


def _call(*kinds: str, before: Callable[[], object] = lambda: None) -> None:
    (kernel,) = compile_kernels("double", (double,), (ops,))
    before()
    for kind in kinds:
        numbers = np.full(2, 3, kind)
        kernel(numbers)
        assert numbers.tolist() == [6, 6]


@pytest.fixture
def kernels_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GALLEY_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


@pytest.mark.parametrize("writable", [True, False])
def test_machine_code_is_kept_if_the_cache_is_writable(writable: bool, kernels_dir: Path) -> None:
    if not writable:
        kernels_dir.parent.write_text("a file, in which no directory can be made")
    _call("float32")
    assert writable == bool(list(kernels_dir.glob("**/*.nbc")))


def test_a_disk_that_fails_before_the_first_call_costs_only_time(kernels_dir: Path) -> None:
    def fail() -> None:
        shutil.rmtree(kernels_dir)
        kernels_dir.touch()

    _call("float32", before=fail)


def test_machine_code_of_other_types_is_not_run(kernels_dir: Path) -> None:
    """Two processes that compile for different types at once may use one file name."""
    _call("float32", "uint16")
    first, second = sorted(kernels_dir.glob("**/*.nbc"))
    first.write_bytes(second.read_bytes())
    _call("float32", "uint16")


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
def test_damaged_machine_code_is_compiled_again(suffix: str, kernels_dir: Path) -> None:
    _call("float32")
    (damaged,) = kernels_dir.glob(f"**/*.{suffix}")
    content = damaged.read_bytes()
    damaged.write_bytes(content[: len(content) // 2])
    _call("float32")
    (again,) = kernels_dir.glob(f"**/*.{suffix}")
    # Two compilations of one function may differ by a few bytes of names.
    assert again.stat().st_size > 0.9 * len(content)
