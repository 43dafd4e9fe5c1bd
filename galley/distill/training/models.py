"""A small Llama in plain torch that can be trained (whole sequences, no cache), and the target as one.

Its parameters have the names of transformers' Llama, so that its state is what a checkpoint holds. Weights
are float32; products run in the dtype of autocast. (Llama: arXiv 2302.13971; grouped queries: 2305.13245.)
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional

from galley.core.errors import InvalidField

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines [length, 1, head_dim]."""

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# First layers give large states: unscaled, the head starts at a loss of 18 to 77.
_NORM_SCALE = 0.15


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The sizes of a Llama; `head_dim` is the width of a head, `rope_theta` the base of its rotations."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    norm_eps: float
    rope_theta: float


class Attention(nn.Module):
    """Causal attention with grouped queries."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self._head_dim = shape.head_dim
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden, bias=False)

    def forward(self, states: Tensor, rotation: Rotation) -> Tensor:
        """Return new states [batch, length, hidden]; nothing attends to the padding at the end."""
        return self.mixed(*self.projected(states, rotation))

    def projected(self, states: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each [batch, its heads, length, head_dim]."""
        batch, length, _ = states.shape
        apart = (batch, length, -1, self._head_dim)
        queries = _rotated(self.q_proj(states).view(apart), rotation).transpose(1, 2)
        keys = _rotated(self.k_proj(states).view(apart), rotation).transpose(1, 2)
        return queries, keys, self.v_proj(states).view(apart).transpose(1, 2)

    def mixed(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return new states of the queries; `mask` [length, keys] says which keys they see. None: causal."""
        batch, heads, length, _ = queries.shape
        group = heads // keys.shape[1]
        if group > 1:
            keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, mask, is_causal=mask is None)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class Feed(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(states)) * self.up_proj(states))
        return out


class Layer(nn.Module):
    """Attention, then feed-forward, each of the normalized states and added to the residual."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Feed(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden, shape.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, shape.norm_eps)

    def forward(self, residual: Tensor, rotation: Rotation, rows: Tensor | None) -> Tensor:
        """Return the new residual [batch, length, hidden], or [rows, hidden] at the flattened `rows`."""
        return self.fed(residual + self.self_attn(self.input_layernorm(residual), rotation), rows)

    def fed(self, residual: Tensor, rows: Tensor | None) -> Tensor:
        """Return the residual after the feed-forward part."""
        if rows is not None:
            residual = residual.flatten(0, 1)[rows]
        out: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out


class Layers(nn.Module):
    """The layers and the final norm; the embedding is given from outside."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(shape) for _ in range(shape.layers)])
        self.norm = nn.RMSNorm(shape.hidden, shape.norm_eps)


class Llama(nn.Module):
    """Layers, a frozen embedding that is not part of the state, and a head of `head_rows` tokens."""

    embedding: Tensor

    def __init__(self, shape: LlamaShape, embedding: Tensor, head_rows: int) -> None:
        super().__init__()
        self.shape = shape
        self.model = Layers(shape)
        self.lm_head = nn.Linear(shape.hidden, head_rows, bias=False)
        self.register_buffer("embedding", embedding.detach(), persistent=False)

    @property
    def layers(self) -> list[Layer]:
        return [cast("Layer", layer) for layer in self.model.layers]

    def states(self, tokens: Tensor, rows: Tensor) -> Tensor:
        """Return normalized states [rows, hidden] of tokens [batch, length], at some flattened `rows`."""
        rotation = rotation_of(self.shape, tokens.shape[1])
        residual = self.embedding[tokens].float()
        *lower, last = self.model.layers
        for layer in lower:
            residual = layer(residual, rotation, None)
        residual = last(residual, rotation, rows)
        out: Tensor = self.model.norm(residual)
        return out

    def layer_states(self, tokens: Tensor, after: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """Return the residual [batch, length, hidden] after each number of layers in `after`, and `states`.

        The states are those of all places, normalized.
        """
        rotation = rotation_of(self.shape, tokens.shape[1])
        residual = self.embedding[tokens].float()
        passed = {0: residual}
        for number, layer in enumerate(self.layers, 1):
            residual = layer(residual, rotation, None)
            if number in after:
                passed[number] = residual
        return [passed[number] for number in after], self.model.norm(residual)


def rotation_of(shape: LlamaShape, length: int) -> Rotation:
    """Return cosines and sines [length, 1, head_dim] of the positions [0, length)."""
    steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32), shape.rope_theta**-steps)
    both = torch.cat([angles, angles], -1).unsqueeze(1)
    return both.cos(), both.sin()


def _rotated(heads: Tensor, rotation: Rotation) -> Tensor:
    """Return rotary positions (arXiv 2104.09864) of heads [batch, length, heads, head_dim], halves apart."""
    cosines, sines = rotation
    first, second = heads.chunk(2, -1)
    turned = heads * cosines + torch.cat([-second, first], -1) * sines
    return turned.to(heads.dtype)


@dataclass(frozen=True, slots=True)
class Target:
    config: dict[str, Any]
    shape: LlamaShape
    weights: dict[str, Tensor]

    @property
    def embedding(self) -> Tensor:
        return self.weights[_EMBEDDING]

    @property
    def head(self) -> Tensor:
        return self.weights.get(_HEAD, self.embedding)

    @property
    def vocab(self) -> int:
        return len(self.embedding)

    @property
    def end_tokens(self) -> tuple[int, ...]:
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
        """Return a draft of the target's first layers; its head is the rows of `head_tokens`, rising.

        Raise InvalidField if the target has fewer layers.
        """
        self.refuse_layers(layers)
        model = Llama(replace(self.shape, layers=layers), self.embedding, len(head_tokens))
        state = {name: self.weights[name] for name in model.state_dict() if name != _HEAD}
        state["model.norm.weight"] = state["model.norm.weight"] * _NORM_SCALE
        model.load_state_dict(state | {_HEAD: self.head[head_tokens]})
        return model

    def refuse_layers(self, layers: int) -> None:
        if not 1 <= layers <= self.shape.layers:
            raise InvalidField("layers", f"must be in [1, {self.shape.layers}], got {layers}")

    def embedding_sha256(self) -> str:
        """Return the sha256 of the embedding as float32, little-endian, row after row."""
        rows = self.embedding.float().contiguous().numpy().astype("<f4", copy=False)
        return sha256(rows.data).hexdigest()


def read_target(directory: Path, *, only_ends: bool = False) -> Target:
    """Return the target in `directory`; with `only_ends` its embedding and head, without any layer.

    Raise InvalidField unless it is a Llama that training supports.
    """
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        weights = _read_weights(directory, (_EMBEDDING, _HEAD) if only_ends else None)
        return Target(config, _shape(config), weights)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise InvalidField("target", f"{directory}: cannot be read: {error!r}") from error


def _read_weights(directory: Path, names: Collection[str] | None) -> dict[str, Tensor]:
    """Return the tensors of these names, or all."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise InvalidField("target", f"{directory}: must hold safetensors")
    weights: dict[str, Tensor] = {}
    for path in files:
        with safe_open(path, "pt") as file:
            stored = file.keys()
            weights |= {name: file.get_tensor(name) for name in stored if names is None or name in names}
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
