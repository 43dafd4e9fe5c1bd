"""Models of random weights, small enough for each test to create its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from galley.engine.model import CausalModel

VOCAB = 128
CONTEXT = 192
STOP = 1
# In a poisoned model its embedding is NaN: every sequence that contains it has NaN logits.
POISON = VOCAB - 1
VLLM_HEAD_SIZE = 32
_HEADS = 4


def save_tiny_model(directory: Path, seed: int = 0, *, poisoned: bool = False, head_size: int = 8) -> Path:
    """Save a model whose greedy answers are the same with poison and without.

    vLLM's attention on the CPU needs a `head_size` of VLLM_HEAD_SIZE.
    """
    model = random_llama(hidden_size=_HEADS * head_size, spread=0.4, seed=seed)
    with torch.no_grad():
        model.lm_head.weight[POISON] = 0.0
    if poisoned:
        poison(model)
    return save(model, directory)


def poison(model: LlamaForCausalLM) -> None:
    with torch.no_grad():
        model.model.embed_tokens.weight[POISON] = float("nan")


def random_llama(*, hidden_size: int, spread: float, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden_size,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=_HEADS,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=spread,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=STOP,
    )
    return LlamaForCausalLM(config)


def save(model: PreTrainedModel, directory: Path) -> Path:
    model.save_pretrained(directory)
    words = {f"w{token}": token for token in range(VOCAB)}
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory


def load_tiny_model(directory: Path, *, kv_blocks: int) -> CausalModel:
    return CausalModel.load(directory, dtype=torch.float32, device="cpu", threads=1, kv_blocks=kv_blocks)


def greedy(directory: Path, prompt: list[int], count: int) -> list[int]:
    model: Any = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.eval()
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]
