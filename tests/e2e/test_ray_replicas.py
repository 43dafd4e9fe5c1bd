"""Two replicas of two ranks on a local Ray: streams survive a lost rank and a removed replica.

`make prove-ray` runs the same with three ranks of the default model.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.e2e.ray_trial import Trial


@pytest.fixture
def four_heads(default_model_dir: Path, tmp_path: Path) -> Path:
    """A small random Llama with the default model's tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(
        default_model_dir,
        hidden_size=64,
        head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        num_hidden_layers=2,
        max_position_embeddings=1024,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    directory = tmp_path / "model"
    LlamaForCausalLM(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(default_model_dir / name, directory / name)
    return directory


@pytest.mark.model
@pytest.mark.timeout(600)  # above the waits of its parts, whose errors say what is missing
async def test_streams_survive_a_lost_rank_and_a_removed_replica(four_heads: Path, tmp_path: Path) -> None:
    await Trial(four_heads, streams=8, max_tokens=128, ranks=2).run(tmp_path)
