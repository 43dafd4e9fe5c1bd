"""LoRA adapters of random weights for a tiny model, and the models that are equal to it with an adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

_RANK, _ALPHA, _SPREAD = 4, 8, 0.3
_MODULES = ("q_proj", "v_proj", "down_proj")
_PREFIX = "base_model.model."


def save_tiny_adapter(model: Path, directory: Path, seed: int, **config: object) -> Path:
    """Save an adapter, in PEFT's format, for the model in a directory."""
    directory.mkdir()
    facts = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _ALPHA, "target_modules": _MODULES, **config}
    (directory / "adapter_config.json").write_text(json.dumps(facts))
    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, weight in _adapted(_load(model)).items():
        outputs, inputs = weight.shape
        for part, shape in (("lora_A", (_RANK, inputs)), ("lora_B", (outputs, _RANK))):
            tensors[f"{_PREFIX}{name}.{part}.weight"] = _SPREAD * torch.randn(*shape, generator=random)
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def save_merged(model: Path, adapter: Path, directory: Path) -> Path:
    """Save the model with the adapter added to its weights."""
    merged, tensors = _load(model), load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name, weight in _adapted(merged).items():
            up, down = (tensors[f"{_PREFIX}{name}.lora_{part}.weight"] for part in "BA")
            weight.add_(_ALPHA / _RANK * up @ down)
    merged.save_pretrained(directory)
    return directory


def _load(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def _adapted(model: Any) -> dict[str, Tensor]:
    return {name: part.weight for name, part in model.named_modules() if name.endswith(_MODULES)}
