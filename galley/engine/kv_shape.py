"""The shape of a model's keys and values, as its own code makes them.

A configuration does not tell: some classes read a `head_dim` that they do not declare, others ignore it.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM

from galley.core.errors import UnsupportedModel
from galley.engine.pages import KvShape
from galley.engine.parallel.ranks import ALONE, Ranks

# transformers' annotations are not accurate.
CAUSAL_LM: Any = AutoModelForCausalLM

# No mask function is registered under this name, so transformers makes no masks.
_NAME = "galley_kv_shape"


class _Reached(Exception):  # no error: it ends the forward pass
    def __init__(self, key: Tensor, value: Tensor) -> None:
        super().__init__()
        self.kv_heads, self.key_dim, self.value_dim = key.shape[1], key.shape[3], value.shape[3]


def kv_shape(config: Any, dtype: torch.dtype, ranks: Ranks = ALONE) -> KvShape:
    """Return a rank's KV shape, taken from the first layer of the model without weights.

    Raises UnsupportedModel if the model's code fails, if its first layer does not call the attention
    function, or if the ranks cannot share the KV heads evenly.
    """
    name = config.model_type
    try:
        first = _first_layer(config)
    except Exception as error:  # a model's code may raise anything
        raise UnsupportedModel(f"{name}: its code must give a KV shape, got {error!r}") from error
    if first is None:
        raise UnsupportedModel(f"{name}: attention must go through transformers' AttentionInterface")
    if first.kv_heads % ranks.size:
        raise UnsupportedModel(
            f"tensor_parallel: must divide the {first.kv_heads} KV heads of {name}, got {ranks.size}"
        )
    kv_heads = first.kv_heads // ranks.size
    return KvShape(config.num_hidden_layers, kv_heads, first.key_dim, first.value_dim, dtype)


@torch.inference_mode()
def _first_layer(config: Any) -> _Reached | None:
    AttentionInterface.register(_NAME, _stop)
    with torch.device("meta"):  # shapes without numbers
        module = CAUSAL_LM.from_config(deepcopy(config), attn_implementation=_NAME).eval()
        tokens = torch.zeros(1, 1, dtype=torch.long)
        try:
            module(input_ids=tokens, position_ids=tokens, use_cache=False)
        except _Reached as reached:
            # Its frames would keep all that is loaded alive.
            return reached.with_traceback(None)
    return None


def _stop(
    module: torch.nn.Module,  # noqa: ARG001  # the signature is transformers'
    query: Tensor,  # noqa: ARG001
    key: Tensor,
    value: Tensor,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, None]:
    raise _Reached(key, value)
