"""A shallower model made of some of a model's layers: a cheap, untrained draft."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from galley.core.errors import UnsupportedModel
from galley.engine.load.module import CAUSAL_LM, load_config, silence

_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "*.jinja", "vocab.*", "merges.txt")


def truncate_model(directory: Path, layers: Sequence[int], out: Path) -> Path:
    """Copy a model with only these layers, in order, to `out` and return it. Raise UnsupportedModel."""
    config = load_config(directory)
    if not layers or not all(0 <= layer < config.num_hidden_layers for layer in layers):
        raise UnsupportedModel(
            f"layers: must be some of 0 to {config.num_hidden_layers - 1}, got {list(layers)}"
        )
    silence()
    model = CAUSAL_LM.from_pretrained(
        directory, local_files_only=True, use_safetensors=True, trust_remote_code=False
    )
    decoder = model.base_model
    if not isinstance(getattr(decoder, "layers", None), torch.nn.ModuleList):
        raise UnsupportedModel(f"{config.model_type}: is not built like Llama")
    decoder.layers = torch.nn.ModuleList([decoder.layers[layer] for layer in layers])
    model.config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        model.config.layer_types = [config.layer_types[layer] for layer in layers]
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    for path in {path for pattern in _TOKENIZER_FILES for path in directory.glob(pattern)}:
        shutil.copyfile(path, out / path.name)
    return out
