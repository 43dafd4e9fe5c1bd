"""Paged attention for transformers' modelling code: all rows of a step at once, KV in a shared pool.

The rows of all sequences lie one after another in one batch row, so every linear layer runs once for all.
Only here are they separated: each row's query attends to its own sequence's keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from galley.core.errors import Broken, UnsupportedModel
from galley.engine.paged import Attention
from galley.engine.pages import Shape
from galley.engine.states import UNTOUCHED, Residuals, add_to_embeddings, hooked

# No mask function is registered under this name, so transformers makes no masks.
NAME = "galley"
_UNSERVED = ("position_bias", "s_aux", "block_sequence_ids")


def register() -> None:
    """Register `attn_implementation="galley"` with transformers; repeating it does nothing."""
    AttentionInterface.register(NAME, paged_attention)


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """The state of one forward call, a keyword argument of `paged_attention`, which adds to `layers`."""

    attention: Attention
    pages: Any  # what `attention` takes as pages
    layers: set[int] = field(default_factory=set)


def run_module(
    module: Any,
    attention: Attention,
    pages: Any,
    tokens: Tensor,
    positions: Tensor,
    logit_rows: Tensor,
    residuals: Residuals = UNTOUCHED,
) -> Tensor:
    """Return float32 logits [logit_rows, vocab_size] of transformers' code over the rows of `pages`.

    `tokens` and `positions` are [1, rows]. Raises Broken unless every layer called our attention.
    """
    step = AttentionStep(attention, pages)
    arguments = {"position_ids": positions, "use_cache": False, "galley_step": step}
    if residuals.added is None:
        arguments["input_ids"] = tokens
    else:
        arguments["inputs_embeds"] = add_to_embeddings(module, tokens, residuals.added)
    with hooked(module, residuals):
        if len(logit_rows) == 0:
            module.base_model(**arguments)
            logits = torch.empty(0, module.config.vocab_size, device=tokens.device)
        else:
            logits = module(**arguments, logits_to_keep=logit_rows).logits[0].float()
    if len(step.layers) != (layers := module.config.num_hidden_layers):
        raise Broken(f"layers: {layers} must call our attention, got {len(step.layers)}")
    return logits


def paged_attention(  # noqa: PLR0913, PLR0917  # the signature is transformers'
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001  # the pages replace it
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    galley_step: AttentionStep | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return attention [1, rows, heads, head_dim] of `query` [1, heads, rows, head_dim] to its sequences.

    Writes `key` and `value` [1, kv_heads, rows, head_dim] into the pool first. Raises UnsupportedModel.
    """
    current = _checked(module, sliding_window, galley_step, others)
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # transformers sets an int
    _refuse_shape(module, layer, current, key, value)
    current.layers.add(layer)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows = [part[0].transpose(0, 1) for part in (query, key, value)]
    mixed = current.attention.store_attend(
        current.pages, layer, rows[0], rows[1], rows[2], Shape(scale, sliding_window, softcap)
    )
    return mixed[None], None


def _checked(
    module: torch.nn.Module, window: int | None, current: AttentionStep | None, others: dict[str, Any]
) -> AttentionStep:
    name = type(module).__name__
    if current is None:
        raise UnsupportedModel(f"{name}: must pass its arguments on to the attention function")
    needed = [other for other in _UNSERVED if others.get(other) is not None]
    if needed:
        raise UnsupportedModel(f"{name}: must not need {needed[0]} in attention")
    if not getattr(module, "is_causal", True):
        raise UnsupportedModel(f"{name}: attention must be causal")
    layer_types = getattr(getattr(module, "config", None), "layer_types", None)
    if window is None and layer_types and layer_types[module.layer_idx] == "sliding_attention":
        raise UnsupportedModel(f"{name}: must pass its sliding window on to the attention function")
    return current


def _refuse_shape(
    module: torch.nn.Module, layer: int, current: AttentionStep, key: Tensor, value: Tensor
) -> None:
    kept = current.attention.pool.shape
    name = type(module).__name__
    if not 0 <= layer < kept.layers:
        raise UnsupportedModel(f"{name}: layer index must be in [0, {kept.layers}), got {layer}")
    shape, got = (kept.kv_heads, kept.key_dim, kept.value_dim), (key.shape[1], key.shape[3], value.shape[3])
    if got != shape:
        raise UnsupportedModel(
            f"{name}: layer {layer}: (kv_heads, key_dim, value_dim) must be {shape}, got {got}"
        )
