"""Drafts that read their target's states, made of plain ones: the projections are random."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from galley.common.models.files import DRAFT_SECTION
from galley.engine.cpu.int8 import quantized
from galley.engine.load.draft_directory import FEATURE_LAYERS, FEATURES_FORMAT, SCALE, WEIGHTS
from galley.engine.load.feature_head import head_shapes


def save_feature_draft(
    source: Path,
    directory: Path,
    layers: Sequence[int],
    *,
    seed: int = 0,
    size: float = 0.1,
    int8: bool = True,
) -> Path:
    """Save the trained draft in `source` as one that reads states after `layers`.

    What states add to an embedding is about `size` times as large as a normalized state. A small one leaves
    most tokens as they are.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config[DRAFT_SECTION] |= {"format": FEATURES_FORMAT, FEATURE_LAYERS: list(layers)}
    weights, random = load_file(source / WEIGHTS), torch.Generator().manual_seed(seed)
    for name, shape in head_shapes(config["hidden_size"], len(layers)).items():
        if len(shape) == 1:
            weights[name] = 0.5 + torch.rand(shape, generator=random)
        else:
            weight = torch.randn(shape, generator=random) * size / shape[1] ** 0.5
            weights[name] = weight
            if int8:
                weights[name], weights[name + SCALE] = quantized(weight)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, directory / WEIGHTS, {"format": "pt"})
    return directory
