"""Models small enough to be cut over processes by a test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

VOCAB = 128


@pytest.fixture(scope="session")
def four_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=False,
        eos_token_id=1,
    )
    return _save(LlamaForCausalLM(config), tmp_path_factory.mktemp("four-heads"))


@pytest.fixture(scope="session")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=VOCAB - 1,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        tie_word_embeddings=True,
        eos_token_id=1,
    )
    model = Qwen2ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    return _save(model, tmp_path_factory.mktemp("biased"))


@pytest.fixture(scope="session")
def nine_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=VOCAB + 1,
        hidden_size=72,
        head_dim=8,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=512,
        initializer_range=0.2,
        eos_token_id=1,
    )
    return _save(LlamaForCausalLM(config), tmp_path_factory.mktemp("nine-heads"))


def _save(model: LlamaForCausalLM | Qwen2ForCausalLM, directory: Path) -> Path:
    model.save_pretrained(directory)
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = {"version": "1.0", "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"}}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory
