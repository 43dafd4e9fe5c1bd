"""The words of galley/core/noise.py in torch, for logits on an accelerator.

The integers are the same on every device. torch has no uint64 arithmetic, so the 32-bit lanes live in int64,
whose products wrap: a mask after the (arithmetic) shift makes their high half non-negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from galley.core.noise import GUMBEL, LANES, MULTIPLIERS, ROUNDS, WEYL, halves, round_keys

_LOW = 0xFFFFFFFF


def philox4x32(counter: Tensor, key: tuple[int, int]) -> Tensor:
    """Return Philox 4x32-10 of each `counter` [..., 4] (int64, in [0, 2**32)) under `key`; int64 [..., 4]."""
    return torch.stack(_rounds(counter.unbind(-1), round_keys(key)), dim=-1)


def row_words(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Return the words of the tokens [0, vocab) for rows of different seeds; int64 [rows, vocab].

    `seeds` and `positions` are int64 [rows, 2]: the low and the high 32 bits.
    """
    blocks = torch.arange(-(-vocab // LANES), device=seeds.device)[None]  # [1, blocks]
    domain = torch.full_like(blocks, GUMBEL)
    low, high = seeds[:, :1], seeds[:, 1:]  # [rows, 1]
    keys = [((low + i * WEYL[0]) & _LOW, (high + i * WEYL[1]) & _LOW) for i in range(ROUNDS)]
    lanes = _rounds((blocks, positions[:, :1], positions[:, 1:], domain), keys)
    return torch.stack(lanes, dim=-1).flatten(1)[:, :vocab]


def _rounds(lanes: Sequence[Tensor], keys: Sequence[tuple[Any, Any]]) -> tuple[Tensor, ...]:
    """Return the four lanes after a round with each of `keys`; all broadcast to one shape."""
    c0, c1, c2, c3 = lanes
    for k0, k1 in keys:
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = ((p1 >> 32) & _LOW) ^ c1 ^ k0, p1 & _LOW
        c2, c3 = ((p0 >> 32) & _LOW) ^ c3 ^ k1, p0 & _LOW
    return c0, c1, c2, c3


def words(seed: int, position: int, token_ids: Tensor, domain: int = GUMBEL) -> Tensor:
    """Return the words of `token_ids` [n] (int64, in [0, 2**34)) at `position`; int64 [n], same device."""
    low, high = halves(position)
    fixed = torch.tensor([low, high, domain], dtype=torch.int64, device=token_ids.device)
    counter = torch.cat(((token_ids >> 2)[:, None], fixed.expand(token_ids.shape[0], -1)), dim=-1)  # [n, 4]
    blocks = philox4x32(counter, halves(seed))
    return blocks.gather(-1, (token_ids % LANES)[:, None])[:, 0]


def gumbel(of_words: Tensor) -> Tensor:
    """Return standard Gumbel noise of the words, float64, elementwise, as `galley.core.noise.gumbel`."""
    t = (of_words.to(torch.float64) + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-t))
