"""Small models of several families, and functions that all their tests use."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from galley.engine.load.module import silence
from galley.engine.model import CausalModel, Rows

VOCAB = 97
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "head_dim": 16,
}


def _config(kind: str, **more: Any) -> Any:
    return getattr(transformers, kind)(**(SMALL | more))


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: _config("LlamaConfig"),
    "qwen2": lambda: _config("Qwen2Config"),
    "qwen3": lambda: _config("Qwen3Config"),
    "mistral": lambda: _config("MistralConfig", sliding_window=37),
    "gemma2": lambda: _config(
        "Gemma2Config", sliding_window=41, query_pre_attn_scalar=16, attn_logit_softcapping=3.0
    ),
    "gpt_neox": lambda: _config("GPTNeoXConfig"),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=1024, n_embd=64, n_layer=3, n_head=4
    ),
}


def save_random(config: Any, directory: Path) -> Path:
    silence()
    torch.manual_seed(7)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(directory)
    vocabulary = {f"t{index}": index for index in range(config.vocab_size)}
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    return directory


def load(directory: Path, dtype: torch.dtype = torch.float32, kv_blocks: int = 128) -> CausalModel:
    return CausalModel.load(directory, dtype=dtype, device="cpu", threads=1, kv_blocks=kv_blocks)


def tokens_of(rng: random.Random, count: int, vocab: int = VOCAB) -> list[int]:
    return [rng.randrange(vocab) for _ in range(count)]


def whole(model: CausalModel, tokens: list[int]) -> torch.Tensor:
    return model.forward([Rows(model.new_cache(), tokens, len(tokens))])[0]
