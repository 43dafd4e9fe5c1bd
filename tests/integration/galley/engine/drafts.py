"""Trained drafts of tiny targets, as `galley distill` writes them, but of random weights."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from galley.common.models.files import tokenizer_hash
from galley.engine.load.draft_directory import embeddings_sha256, read_embedding
from galley.engine.model import CausalModel
from tests.fakes.model_configs import CONFIGS, save_random

HEAD_TOKENS = (*range(1, 40), *range(50, 96, 2), 96, 43)
LAYERS = 2
# Of what the kernels of int8 weights take: inputs in groups of 64, outputs in blocks of 32.
TARGET: dict[str, Any] = {"intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


def save_target(directory: Path) -> Path:
    config = CONFIGS["llama"]()
    config.update(TARGET)
    return save_random(config, directory)


@dataclass
class Draft:
    config: dict[str, Any]
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def section(self) -> dict[str, Any]:
        section: dict[str, Any] = self.config["galley_draft"]
        return section

    def save(self, directory: Path) -> Path:
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(self.config))
        save_file(self.weights, directory / "model.safetensors")
        return directory


def draft_of(target: Path, *, own: bool = False, int8: bool = True) -> Draft:
    whole = load_file(target / "model.safetensors")
    heads = sorted(HEAD_TOKENS)
    kept = {
        name: weight
        for name, weight in whole.items()
        if name == "model.norm.weight" or any(f".layers.{layer}." in name for layer in range(LAYERS))
    }
    kept["lm_head.weight"] = whole["lm_head.weight"][heads]
    if own:
        kept["model.embed_tokens.weight"] = whole["model.embed_tokens.weight"]
    draft = Draft(_config(target, len(heads), own=own))
    for name, weight in kept.items():
        draft.weights[name] = weight.contiguous()
        if int8 and weight.ndim > 1:
            scale = weight.abs().amax(1) / 127
            draft.weights[name] = (weight / scale[:, None]).round().to(torch.int8)
            draft.weights[f"{name}.scale"] = scale
    draft.weights["galley.head_tokens"] = torch.tensor(heads, dtype=torch.int32)
    return draft


def _config(target: Path, head_vocab: int, *, own: bool) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((target / "config.json").read_text())
    section = {
        "format": 1,
        "tokenizer_hash": tokenizer_hash(target),
        "head_vocab": head_vocab,
        "embeddings": "own" if own else "target",
    }
    if not own:
        section["embeddings_sha256"] = embeddings_sha256(read_embedding(target))
    return config | {"num_hidden_layers": LAYERS, "tie_word_embeddings": False, "galley_draft": section}


def load_draft(
    directory: Path,
    target: Path | None,
    dtype: torch.dtype = torch.float32,
    kv_blocks: int = 128,
    threads: int = 1,
) -> CausalModel:
    return CausalModel.load(
        directory, dtype=dtype, device="cpu", threads=threads, kv_blocks=kv_blocks, target=target
    )
