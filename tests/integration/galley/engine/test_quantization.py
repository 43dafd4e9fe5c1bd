"""Targets with int8 weights: near the float weights, the same bits in any step, refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from galley.core.errors import UnsupportedModel
from galley.engine.batch import INT8, NONE
from galley.engine.cpu import int8, llama
from galley.engine.cpu.kernels import openmp
from galley.engine.fingerprint import build_of
from galley.engine.model import CausalModel
from tests.fakes.model_configs import CONFIGS, tokens_of, whole
from tests.integration.services.target.invariance import InvarianceTrial

MakeModel = Callable[[Any], Path]

BLOCKS = 64
# Inputs of all layers are multiples of 64.
SIZES = {"intermediate_size": 128}


def config_of(kind: str, **more: Any) -> Any:
    return type(CONFIGS[kind]())(**CONFIGS[kind]().to_diff_dict() | SIZES | more)


def load(
    directory: Path, dtype: torch.dtype = torch.float32, quantization: str = INT8, device: str = "cpu"
) -> CausalModel:
    return CausalModel.load(
        directory, dtype=dtype, device=device, threads=1, kv_blocks=BLOCKS, quantization=quantization
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "config",
    [
        config_of("llama"),
        config_of("llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
        config_of("mistral"),
        config_of("qwen2"),
        config_of("qwen3"),
    ],
    ids=["llama", "llama, tied, with biases", "mistral", "qwen2", "qwen3"],
)
def test_logits_are_near_those_of_float_weights_and_keep_their_bits(
    config: Any, dtype: torch.dtype, make_model: MakeModel
) -> None:
    directory = make_model(config)
    tokens = tokens_of(random.Random(1), 90)
    expected = whole(load(directory, quantization=NONE), tokens)
    model = load(directory, dtype)
    assert model.forward_kind == "own"
    assert model.info.deterministic
    assert model.info.number_types == f"{model.info.dtype}+int8"
    error = float((whole(model, tokens) - expected).norm() / expected.norm())
    assert 0.001 < error < 0.1
    trial = InvarianceTrial(model, sequences=4, longest=170, seed=11)
    counts = trial.run(30)
    assert counts.differing == 0, counts.first_difference
    assert min(counts.rows, counts.evictions, counts.copied_blocks, counts.drafts_fed) > 0


def test_more_threads_change_no_bit(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, tokens = make_model(config_of("qwen2")), tokens_of(random.Random(2), 90)
    expected = whole(load(directory, torch.bfloat16), tokens)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(openmp, "_WORTH_NS", 0)
    assert torch.equal(whole(load(directory, torch.bfloat16), tokens), expected)


def test_the_weights_in_float_are_not_kept(make_model: MakeModel) -> None:
    model = load(make_model(config_of("llama")))
    forward: Any = model._forward
    assert {type(one) for one in forward._products()} == {int8.Int8Product}


def test_a_build_with_int8_weights_is_another(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GALLEY_CACHE_DIR", str(tmp_path / "cache"))
    directory = make_model(config_of("llama"))
    plain, quantized = build_of(load(directory, quantization=NONE)), build_of(load(directory))
    assert quantized == build_of(load(directory))
    assert quantized.fingerprint != plain.fingerprint
    assert quantized.weights_digest == plain.weights_digest, "the files are the same"


@pytest.mark.parametrize(
    ("config", "given", "problem"),
    [
        (config_of("llama"), {"device": "cuda"}, "llama in float32 on cuda"),
        (config_of("llama"), {"dtype": torch.float16}, "llama in float16 on cpu"),
        (config_of("gemma2"), {}, "gemma2 in float32 on cpu; int8 is for llama, mistral, qwen2, qwen3"),
        (CONFIGS["llama"](), {}, "intermediate_size of a rank must be a multiple of 64, got 96"),
        (config_of("llama", head_dim=24), {}, "heads of a rank must be a multiple of 64, got 96"),
        (
            config_of("llama", hidden_size=96, head_dim=32),
            {},
            "hidden_size of a rank must be a multiple of 64, got 96",
        ),
    ],
)
def test_a_model_that_cannot_be_int8_is_refused_before_its_weights_are_read(
    config: Any, given: dict[str, Any], problem: str, make_model: MakeModel
) -> None:
    directory = make_model(config)
    for weights in directory.glob("*.safetensors"):
        weights.write_bytes(b"")
    with pytest.raises(UnsupportedModel, match=f"quantization: must be none for .*{problem}"):
        load(directory, **given)


def test_a_cpu_without_the_instructions_is_refused(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama, "instructions", lambda: None)
    with pytest.raises(UnsupportedModel, match="quantization: must be none on this CPU"):
        load(make_model(config_of("llama")))


def test_a_model_that_our_forward_does_not_take_is_refused(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama, "can_serve", lambda module, pool: False)
    with pytest.raises(UnsupportedModel, match="quantization: must be none"):
        load(make_model(config_of("llama")))
