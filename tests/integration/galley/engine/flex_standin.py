"""What torch's kernel of FlexAttention does on a GPU, in plain operators, tile by tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask


def kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    score_mod: Callable[..., Tensor] | None,
    block_mask: BlockMask,
    scale: float,
    kernel_options: dict[str, Any] | None,
) -> Tensor:
    assert kernel_options is None or query.device.type == "cuda"
    slots, keys_of_block = block_mask.BLOCK_SIZE
    assert block_mask.seq_lengths == (query.shape[2], key.shape[2])
    mixed = torch.full((*query.shape[:3], value.shape[3]), torch.nan, dtype=query.dtype)
    counts, tables = block_mask.kv_num_blocks[0, 0], block_mask.kv_indices[0, 0]
    nothing = torch.zeros(())
    for tile, count in enumerate(counts.tolist()):
        own = torch.arange(tile * slots, (tile + 1) * slots)
        seen = (tables[tile, :count, None] * keys_of_block + torch.arange(keys_of_block)).flatten()
        scores = query[0, :, own].float() @ key[0, :, seen].float().mT * scale
        if score_mod is not None:
            scores = score_mod(scores, nothing, nothing, own[:, None], seen[None])
        mask = block_mask.mask_mod(nothing, nothing, own[:, None], seen[None])
        weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1)
        weights = torch.where(mask.any(-1, keepdim=True), weights, 0)
        mixed[0, :, own] = (weights @ value[0, :, seen].float()).to(query.dtype)
    return mixed
