"""Ranks over gloo: they agree with one process, and keep the bits of a position in any company."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, GPT2Config, LlamaConfig, Phi3Config

from galley.core.errors import UnsupportedModel
from galley.engine.batch import INT8
from galley.engine.parallel.ranks import ALONE
from galley.engine.parallel.sharding import refuse_ranks
from tests.fakes.model_configs import CONFIGS, save_random
from tests.integration.services.ray.program import Work, run
from tests.integration.services.ray.ranks import run_ranks

# Logits are about 20 in size; ranks sum in another order.
TOLERANCE = 1e-3

OTHERS = ("mistral", "qwen3", "gemma2", "gpt_neox")


def agree(ours: dict[str, Any], alone: dict[str, Any]) -> None:
    assert torch.allclose(alone["logits"], ours["logits"], rtol=0, atol=TOLERANCE)
    assert torch.allclose(alone["states"], ours["states"], rtol=TOLERANCE, atol=TOLERANCE)
    assert alone["greedy"] == ours["greedy"]


def keeps_bits(results: dict[str, Any]) -> None:
    assert results["deterministic"]
    assert results["rows"] > 0
    assert results["differing"] == 0, results["trials"]


def _wide(config: Any) -> Any:
    config.intermediate_size = 128
    return config


def test_two_ranks_agree_with_one(four_heads: Path, biased: Path, tmp_path: Path) -> None:
    others = [save_random(_wide(CONFIGS[kind]()), tmp_path / kind) for kind in OTHERS]
    works = [
        Work(str(four_heads)),
        Work(str(biased)),
        *(Work(str(other), new_tokens=2, passes=4) for other in others),
    ]
    for work, two in zip(works, run_ranks(2, works, tmp_path / "two"), strict=True):
        alone = run(work, ALONE)
        agree(two, alone)
        keeps_bits(two)
        assert 2 * two["kv_bytes"] == alone["kv_bytes"]


def test_ranks_with_int8_weights_keep_their_bits_and_stay_near_one(tmp_path: Path) -> None:
    """Each rank has scales of its own for the inputs that it holds, so the logits are not those of one."""
    config = LlamaConfig(
        **CONFIGS["llama"]().to_diff_dict()
        | {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "vocab_size": 98}
    )
    work = Work(str(save_random(config, tmp_path / "wide")), quantization=INT8)
    (two,) = run_ranks(2, [work], tmp_path / "two")
    keeps_bits(two)
    alone = run(work, ALONE)["logits"]
    assert 0 < float((two["logits"] - alone).norm() / alone.norm()) < 0.1


def test_three_ranks_agree_with_one_and_keep_their_bits(nine_heads: Path, tmp_path: Path) -> None:
    """Use a model of the default model's heads; `make prove-ray` uses the default model."""
    works = [Work(str(nine_heads), dtype, new_tokens=2) for dtype in ("float32", "bfloat16")]
    full, half = run_ranks(3, works, tmp_path / "three")
    agree(full, run(works[0], ALONE))
    for one in (full, half):
        keeps_bits(one)


def test_a_rank_may_be_late_while_all_load_and_is_given_up_when_they_serve() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.services.ray.late"],
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    results = json.loads(done.stdout)
    assert results["long"] == "2.0"
    assert results["short"].startswith("rank 0 lost another rank")


def test_ranks_that_do_not_divide_are_refused_with_the_numbers(default_model_dir: Path) -> None:
    config = AutoConfig.from_pretrained(default_model_dir)
    with pytest.raises(UnsupportedModel, match="must divide num_attention_heads = 9 of llama, got 2"):
        refuse_ranks(config, 2)
    refuse_ranks(config, 3)


@pytest.mark.parametrize(
    ("config", "size", "problem"),
    [
        (
            LlamaConfig(hidden_size=64, num_attention_heads=8, num_key_value_heads=2),
            4,
            "num_key_value_heads = 2",
        ),
        (
            LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=4, intermediate_size=90),
            4,
            "intermediate_size = 90",
        ),
        (GPT2Config(n_layer=1), 2, "no tensor-parallel plan"),
        (
            Phi3Config(num_hidden_layers=1, hidden_size=64, num_attention_heads=4),
            2,
            "no tensor-parallel plan",
        ),
    ],
)
def test_unsplittable_shape_is_refused(config: Any, size: int, problem: str) -> None:
    with pytest.raises(UnsupportedModel, match=problem):
        refuse_ranks(config, size)
