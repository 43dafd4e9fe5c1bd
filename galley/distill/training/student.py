"""A small Llama in plain torch that can be trained: whole sequences, no cache.

Its parameters have the names of transformers' Llama, so that its state is what a checkpoint holds. Weights
are float32; products run in the dtype of autocast. (Llama: arXiv 2302.13971; grouped queries: 2305.13245.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The sizes of a Llama; `head_dim` numbers a head, `rope_theta` is the base of its rotations."""

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

    def forward(self, states: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Return [batch, length, hidden] of the same; padding is at the end, where nothing attends to it."""
        batch, length, _ = states.shape
        apart = (batch, length, -1, self._head_dim)
        queries = _rotated(self.q_proj(states).view(apart), rotation).transpose(1, 2)
        keys = _rotated(self.k_proj(states).view(apart), rotation).transpose(1, 2)
        values = self.v_proj(states).view(apart).transpose(1, 2)
        group = queries.shape[1] // keys.shape[1]
        if group > 1:
            keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class Feed(nn.Module):
    """The gated feed-forward part of a layer."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """Return [batch, length, hidden] of the same."""
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

    def forward(self, residual: Tensor, rotation: tuple[Tensor, Tensor], rows: Tensor | None) -> Tensor:
        """Return [batch, length, hidden] of the same, or [rows, hidden]: some rows of it flattened."""
        residual = residual + self.self_attn(self.input_layernorm(residual), rotation)
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

    def states(self, tokens: Tensor, rows: Tensor) -> Tensor:
        """Return normalized states [rows, hidden] of tokens [batch, length], at some flattened `rows`."""
        rotation = _rotation(self.shape, tokens.shape[1])
        residual = self.embedding[tokens].float()
        *lower, last = self.model.layers
        for layer in lower:
            residual = layer(residual, rotation, None)
        residual = last(residual, rotation, rows)
        out: Tensor = self.model.norm(residual)
        return out


def _rotation(shape: LlamaShape, length: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [length, 1, head_dim] of the positions [0, length)."""
    steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32), shape.rope_theta**-steps)
    both = torch.cat([angles, angles], -1).unsqueeze(1)
    return both.cos(), both.sin()


def _rotated(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Return rotary positions (arXiv 2104.09864) of heads [batch, length, heads, head_dim], halves apart."""
    cosines, sines = rotation
    first, second = heads.chunk(2, -1)
    turned = heads * cosines + torch.cat([-second, first], -1) * sines
    return turned.to(heads.dtype)
