"""Two replicas of three ranks on a local Ray: no stream notices what befalls them. See `make prove-ray`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.e2e.ray_trial import Trial


@pytest.fixture
def nine_heads(default_model_dir: Path, tmp_path: Path) -> Path:
    """A random Llama with the default model's heads and tokenizer, which starts in a fraction of its time."""
    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(
        default_model_dir,
        hidden_size=144,
        head_dim=16,
        intermediate_size=192,
        num_hidden_layers=3,
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
@pytest.mark.timeout(240)
async def test_no_stream_notices_a_killed_rank_or_a_replica_less(nine_heads: Path, tmp_path: Path) -> None:
    await Trial(nine_heads, streams=16, max_tokens=128).run(tmp_path)
