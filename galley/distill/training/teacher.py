"""The target as training uses it: a Llama's shape and weights, read from safetensors."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from galley.core.errors import InvalidField
from galley.distill.training.student import Llama, LlamaShape

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# First layers give large states: unscaled, the head starts at a loss of 18 to 77.
_NORM_SCALE = 0.15


@dataclass(frozen=True, slots=True)
class Target:
    """The parts of the target's directory that a draft is made of."""

    config: dict[str, Any]
    shape: LlamaShape
    weights: dict[str, Tensor]

    @property
    def embedding(self) -> Tensor:
        """Return [vocab, hidden], as stored."""
        return self.weights[_EMBEDDING]

    @property
    def head(self) -> Tensor:
        """Return [vocab, hidden]: the embedding itself if they are tied."""
        return self.weights.get(_HEAD, self.embedding)

    @property
    def vocab(self) -> int:
        """Return the number of tokens of the vocabulary."""
        return len(self.embedding)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Return the model's end tokens."""
        ids = self.config.get("eos_token_id")
        return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)

    def whole(self, dtype: torch.dtype) -> Llama:
        """Return the target itself: matrices in `dtype`, norms in float32, as the residual is."""
        model = Llama(self.shape, self.embedding, self.vocab)
        kept = {name: weight for name, weight in self.weights.items() if name != _EMBEDDING}
        model.load_state_dict(kept | {_HEAD: self.head})
        model = model.to(dtype).eval().requires_grad_(requires_grad=False)
        for norm in model.modules():
            if isinstance(norm, nn.RMSNorm):
                norm.float()
        return model

    def student(self, layers: int, head_tokens: Tensor) -> Llama:
        """Return a draft of the target's first layers; its head is the rows of `head_tokens` [head_rows],
        rising.

        Raises InvalidField if the target has fewer layers.
        """
        self.refuse_layers(layers)
        model = Llama(replace(self.shape, layers=layers), self.embedding, len(head_tokens))
        state = {name: self.weights[name] for name in model.state_dict() if name != _HEAD}
        state["model.norm.weight"] = state["model.norm.weight"] * _NORM_SCALE
        model.load_state_dict(state | {_HEAD: self.head[head_tokens]})
        return model

    def refuse_layers(self, layers: int) -> None:
        """Raise InvalidField if the target has fewer layers."""
        if not 1 <= layers <= self.shape.layers:
            raise InvalidField("layers", f"must be in [1, {self.shape.layers}], got {layers}")

    def embedding_sha256(self) -> str:
        """Return the sha256 of the embedding as float32, little-endian, row after row."""
        rows = self.embedding.float().contiguous().numpy().astype("<f4", copy=False)
        return sha256(rows.data).hexdigest()


def read_target(directory: Path) -> Target:
    """Return the target in `directory`. Raises InvalidField if it is not a Llama that training supports."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        weights = _read_weights(directory)
        return Target(config, _shape(config), weights)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise InvalidField("target", f"{directory}: cannot be read: {error!r}") from error


def _read_weights(directory: Path) -> dict[str, Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise InvalidField("target", f"{directory}: must hold safetensors")
    weights: dict[str, Tensor] = {}
    for file in files:
        weights |= load_file(file)
    return weights


def _shape(config: dict[str, Any]) -> LlamaShape:
    if config.get("model_type") != "llama":
        raise InvalidField("target", f"must be a llama, got {config.get('model_type')!r}")
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise InvalidField("target", "must be a llama without biases")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        raise InvalidField("target", f"rope_type must be default, got {rope['rope_type']!r}")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    return LlamaShape(
        hidden=hidden,
        inner=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        layers=config["num_hidden_layers"],
        norm_eps=config["rms_norm_eps"],
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
    )
