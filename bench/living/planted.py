"""Bad drafts, made from good ones: worse by noise, useless by a shuffled head, slow by idle layers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from galley.common.draft_loading import CONFIG, WEIGHTS

NOISE, SHUFFLED, SLOW = "noise on its weights", "shuffled head", "idle layers"
KINDS = (NOISE, SHUFFLED, SLOW)

_NOISE = 1.0
"""Standard deviation of the noise, in those of a matrix's own weights."""
_IDLE_LAYERS = 24
_LAYERS = "num_hidden_layers"
_HEAD, _HEAD_SCALE = "lm_head.weight", "lm_head.weight.scale"
_OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")

_Weights = dict[str, Tensor]


def plant(kind: str, good: Path, folder: Path) -> None:
    """Write a bad draft of this kind to `folder`, made from the draft in `good`. Blocks."""
    config = json.loads((good / CONFIG).read_text(encoding="utf-8"))
    weights = load_file(good / WEIGHTS)
    _SPOILERS[kind](weights, config, torch.Generator().manual_seed(1))
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    save_file({name: one.contiguous() for name, one in weights.items()}, folder / WEIGHTS, {"format": "pt"})


def _add_noise(weights: _Weights, _: Mapping[str, object], random: torch.Generator) -> None:
    """Add noise to the int8 matrices of the layers."""
    for name, weight in weights.items():
        if weight.dtype == torch.int8 and name != _HEAD:
            spread = _NOISE * weight.float().std()
            noise = spread * torch.randn(weight.shape, generator=random)
            weights[name] = (weight.float() + noise).round().clamp(-127, 127).to(torch.int8)


def _shuffle_head(weights: _Weights, _: Mapping[str, object], random: torch.Generator) -> None:
    """Give each token of the head the row of another one."""
    order = torch.randperm(len(weights[_HEAD]), generator=random)
    for name in (_HEAD, _HEAD_SCALE):
        weights[name] = weights[name][order]


def _add_idle_layers(weights: _Weights, config: dict[str, object], _: torch.Generator) -> None:
    """Add layers that take time and add nothing: the draft tokens stay as they are."""
    first = config[_LAYERS]
    if not isinstance(first, int):
        raise TypeError(f"{CONFIG}: {_LAYERS}: must be a number, got {first!r}")
    of_first = {name: weight for name, weight in weights.items() if name.startswith(_prefix(0))}
    for layer in range(first, first + _IDLE_LAYERS):
        for name, weight in of_first.items():
            own = name.removeprefix(_prefix(0))
            weights[_prefix(layer) + own] = torch.zeros_like(weight) if own in _OUTPUTS else weight.clone()
    config[_LAYERS] = first + _IDLE_LAYERS


def _prefix(layer: int) -> str:
    return f"model.layers.{layer}."


_SPOILERS: Mapping[str, Callable[[_Weights, dict[str, object], torch.Generator], None]] = {
    NOISE: _add_noise,
    SHUFFLED: _shuffle_head,
    SLOW: _add_idle_layers,
}
