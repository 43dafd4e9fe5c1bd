"""A model of random weights whose streams last long enough to be disturbed."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.fakes import tiny_model as tiny

CONTEXT = 2048
_HIDDEN = 256


def save_model(directory: Path) -> Path:
    """Config, safetensors and tokenizer.json; it may say any token, for none is poison."""
    model = tiny.random_llama(hidden_size=_HIDDEN, spread=0.1, seed=0)
    with torch.no_grad():
        model.model.embed_tokens.weight[tiny.POISON] = 0.0
    model.config.max_position_embeddings = CONTEXT
    return tiny.save(model, directory)
