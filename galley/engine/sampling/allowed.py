"""The tokens that grammars allow: bit masks of rows, 32 tokens a word, for kernels and for torch.

A token that is not allowed gets -inf added, so that NaN anywhere in a row is still found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from galley.core.errors import Broken
from galley.core.step import Draw
from galley.engine.sampling.layout import Floats, part

Words = NDArray[np.uint32]

_WORD: Final = 32
# Numbers that torch spreads at once: each takes some bytes.
_NUMBERS: Final = 2**24
_ALL, _ONE, _NONE = np.uint32(0xFFFFFFFF), np.uint32(1), np.uint32(0)
_LOWEST: Final = np.float32(-np.inf)
_NO_ROWS = np.zeros((0, 1), dtype=np.uint32)


def allowed_rows(draws: Sequence[Draw]) -> Words:
    """Return the masks of all draws that have some, end to end: [rows, words]."""
    masks = [_checked(draw, draw.allowed) for draw in draws if draw.allowed is not None]
    return np.ascontiguousarray(np.concatenate(masks)) if masks else _NO_ROWS


def _checked(draw: Draw, allowed: Words) -> Words:
    if len(allowed) != len(draw.draft_tokens) + 1:
        raise Broken(f"allowed: must have {len(draw.draft_tokens) + 1} rows, got {len(allowed)}")
    return allowed


def allows_any(allowed: Words, tokens: NDArray[np.int64]) -> bool:
    """Return True if a row's mask [words] allows one of `tokens`."""
    inside = tokens[tokens < len(allowed) * _WORD]
    return bool(((allowed[inside // _WORD] >> (inside % _WORD).astype(np.uint32)) & _ONE).any())


def constrain(logits: Tensor, draws: Sequence[Draw], firsts: Sequence[int]) -> Tensor:
    """Return the logits as float32, with -inf added to the tokens that the draws do not allow.

    `firsts` are the first rows of the draws. The result is a copy if one of the draws has a mask.
    """
    masked = [(draw, first) for draw, first in zip(draws, firsts, strict=True) if draw.allowed is not None]
    if not masked:
        return logits.float()
    at = [first + i for draw, first in masked for i in range(len(draw.draft_tokens) + 1)]
    rows = logits.to(torch.float32, copy=True)
    index = torch.tensor(at, device=rows.device)
    words = torch.from_numpy(allowed_rows([draw for draw, _ in masked]).view(np.int32)).to(rows.device)
    step = max(1, _NUMBERS // rows.shape[1])
    for some, masks in zip(torch.split(index, step), torch.split(words, step), strict=True):
        rows.index_copy_(0, some, rows.index_select(0, some) + _penalties(masks, rows.shape[1]))
    return rows


def _penalties(allowed: Tensor, vocab: int) -> Tensor:
    """Return 0 for allowed tokens and -inf for others, float32 [rows, vocab], from int32 [rows, words]."""
    bits = torch.arange(_WORD, dtype=torch.int32, device=allowed.device)
    spread = ((allowed[:, :, None] >> bits) & 1).flatten(1)[:, :vocab].bool()
    penalties = torch.full((len(allowed), vocab), -torch.inf, device=allowed.device)
    penalties[:, : spread.shape[1]].masked_fill_(spread, 0.0)
    return penalties


@part
def copy_allowed(row: Floats, allowed: Words, out: Floats) -> None:
    """Copy `row` to `out`, and add -inf to the tokens that the mask [words] does not allow."""
    for word in range((len(row) + _WORD - 1) // _WORD):
        bits = allowed[word] if word < len(allowed) else _NONE
        first, last = word * _WORD, min((word + 1) * _WORD, len(row))
        if bits == _ALL:
            for j in range(first, last):
                out[j] = row[j]
        elif bits == _NONE:
            for j in range(first, last):
                out[j] = row[j] + _LOWEST
        else:
            for j in range(first, last):
                out[j] = row[j] if (bits >> np.uint32(j - first)) & _ONE else row[j] + _LOWEST


@part
def is_allowed(token: int, allowed: Words) -> bool:
    """Return True if a row's mask [words] allows the token."""
    word = token // _WORD
    return word < len(allowed) and (allowed[word] >> np.uint32(token - word * _WORD)) & _ONE == _ONE
