"""Ranks over gloo: they agree with one process, and keep the bits of a position in any company."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, GPT2Config, LlamaConfig, Phi3Config

from services.engine.errors import UnsupportedModel
from services.engine.ranks import ALONE
from services.engine.sharding import refuse_ranks
from tests.ray.program import work
from tests.ray.ranks import run_ranks

# Of float32 logits, whose size is about 20: sums are cut elsewhere.
TOLERANCE = 1e-3


def task(
    model: Path, *dtypes: str, cuts: tuple[int, ...] = (1, 2, 3, 5, 16), rounds: int = 2
) -> dict[str, Any]:
    prompt = [3 * i % 100 for i in range(40)]
    return {
        "model": str(model),
        "dtypes": dtypes,
        "prompt": prompt,
        "new_tokens": 5,
        "cuts": cuts,
        "rounds": rounds,
        "seed": 1,
    }


@pytest.mark.parametrize("model", ["four_heads", "biased"])
def test_two_ranks_agree_with_one(model: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    told = task(request.getfixturevalue(model), "float32")
    alone, two = work(told, "float32", ALONE), run_ranks(2, told, tmp_path / "two")["float32"]
    assert torch.allclose(alone["logits"], two["logits"], rtol=0, atol=TOLERANCE)
    assert alone["greedy"] == two["greedy"]
    assert two["differing"] == 0
    assert 2 * two["kv_bytes"] == alone["kv_bytes"]


@pytest.mark.model
def test_three_ranks_of_the_default_model(default_model_dir: Path, tmp_path: Path) -> None:
    told = task(default_model_dir, "float32", "bfloat16", cuts=(1, 7, 16), rounds=1)
    three = run_ranks(3, told, tmp_path / "three")
    alone, single = work(told, "float32", ALONE), three["float32"]
    assert torch.allclose(alone["logits"], single["logits"], rtol=0, atol=TOLERANCE)
    assert alone["greedy"] == single["greedy"]
    for found in three.values():
        assert found["differing"] == 0
        assert found["deterministic"]


def test_ranks_that_do_not_divide_are_refused_with_the_numbers(default_model_dir: Path) -> None:
    config = AutoConfig.from_pretrained(default_model_dir)
    with pytest.raises(UnsupportedModel, match=r"2 ranks cannot share num_attention_heads = 9 evenly"):
        refuse_ranks(config, 2)
    refuse_ranks(config, 3)


@pytest.mark.parametrize(
    ("config", "size", "said"),
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
def test_what_cannot_be_cut_is_refused(config: Any, size: int, said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        refuse_ranks(config, size)
