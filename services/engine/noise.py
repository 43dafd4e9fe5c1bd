"""The words of services/core/noise.py in torch, for logits that live on an accelerator.

The same integers to the bit on every device; torch has no uint64 arithmetic, so the 32-bit lanes live in
int64, whose products wrap: their high half is made non-negative by a mask after the (arithmetic) shift.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.core.noise import GUMBEL, LANES, MULTIPLIERS, halves, round_keys

_LOW = 0xFFFFFFFF


def philox4x32(counter: Tensor, key: tuple[int, int]) -> Tensor:
    """Philox 4x32-10 of each `counter` [..., 4] (int64, in [0, 2**32)) under `key`; int64 words [..., 4]."""
    c0, c1, c2, c3 = counter.unbind(-1)
    for k0, k1 in round_keys(key):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = ((p1 >> 32) & _LOW) ^ c1 ^ k0, p1 & _LOW
        c2, c3 = ((p0 >> 32) & _LOW) ^ c3 ^ k1, p0 & _LOW
    return torch.stack((c0, c1, c2, c3), dim=-1)


def words(seed: int, position: int, token_ids: Tensor, domain: int = GUMBEL) -> Tensor:
    """The word of each of `token_ids` [n] (int64, in [0, 2**34)) at `position`; int64 [n], same device."""
    low, high = halves(position)
    fixed = torch.tensor([low, high, domain], dtype=torch.int64, device=token_ids.device)
    counter = torch.cat(((token_ids >> 2)[:, None], fixed.expand(token_ids.shape[0], -1)), dim=-1)  # [n, 4]
    blocks = philox4x32(counter, halves(seed))
    return blocks.gather(-1, (token_ids % LANES)[:, None])[:, 0]


def gumbel(of_words: Tensor) -> Tensor:
    """Standard Gumbel noise of the words, float64, elementwise, as `services.core.noise.gumbel`."""
    t = (of_words.to(torch.float64) + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-t))
