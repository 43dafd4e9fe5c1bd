"""Sampling where the logits are: of most draws nothing but the tokens comes to the host, in one transfer.

A plain draw's rows are drawn on the device, all at once: none of them depends on the guess before it, so it
can be decided later which happened. The rows of all other draws come to the host in the same transfer and
are drawn there. What a draw gives is what galley/engine/sampling/draw.py says of it; the noise takes the
device's own logarithms and agrees to 1e-6 with the host's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from galley.common.logs import get_logger
from galley.core.noise import halves
from galley.core.step import Draw, Sampled
from galley.engine.cuda.transfer import host_buffer, to_host
from galley.engine.sampling import torch_noise as noise
from galley.engine.sampling.draw import Outcome, draw_rows
from galley.engine.sampling.layout import NOTHING, Floats
from galley.engine.sampling.rules import is_plain, kernel_temperature, no_maximum

Words = Callable[[Tensor, Tensor, int], Tensor]

_LOG = get_logger(__name__)

# Numbers that are worked on at once: each takes some tens of bytes.
_MOST = 2**24
_LOW = 0xFFFFFFFF
# Of the noise: its row, seed and position as two halves each, the bits of the temperature.
_NOISY_COLUMNS = 6


def is_drawn_here(draw: Draw) -> bool:
    """Is each token a function of its row of logits, the temperature, seed and position alone?"""
    params = draw.params
    unfiltered = params.top_k == 0 and params.top_p >= 1.0 and params.min_p <= 0.0
    return is_plain(draw) and (params.greedy or unfiltered)


def draw_all(logits: Tensor, draws: Sequence[Draw]) -> list[Outcome]:
    """See `galley.engine.sampling.draw.draw_all`; the rows are the draws'."""
    ends = list(accumulate(len(draw.draft_tokens) + 1 for draw in draws))
    here = [(draw, end) for draw, end in zip(draws, ends, strict=True) if is_drawn_here(draw)]
    others = [(draw, end) for draw, end in zip(draws, ends, strict=True) if not is_drawn_here(draw)]
    tokens, rows = _fetch(logits, here, [row for pair in others for row in _rows_of(*pair)])
    given = iter(draw_rows(rows, [draw for draw, _ in others]) if others else ())
    own = iter([_outcome(draw, tokens[list(_rows_of(draw, end))].tolist()) for draw, end in here])
    return [next(own) if is_drawn_here(draw) else next(given) for draw in draws]


def _rows_of(draw: Draw, end: int) -> range:
    return range(end - len(draw.draft_tokens) - 1, end)


def _outcome(draw: Draw, tokens: list[int]) -> Outcome:
    """Up to and with the first that differs from its guess, or before the first bad row."""
    taken: list[int] = []
    for i, token in enumerate(tokens):
        if token == NOTHING:
            break
        taken.append(token)
        if draw.draft_tokens[i : i + 1] != (token,):
            break
    return Sampled(tuple(taken)) if taken else no_maximum(draw)


def _fetch(
    logits: Tensor, here: Sequence[tuple[Draw, int]], others: list[int]
) -> tuple[np.ndarray[Any, np.dtype[np.int32]], Floats]:
    """On the host: each row's token, of worth where it is `here`, and the logits of the rows `others`."""
    noisy = [_record(*pair, row) for pair in here for row in _rows_of(*pair) if not pair[0].params.greedy]
    told = _upload([*others, *(number for record in noisy for number in record)], logits.device)
    count, vocab = logits.shape
    tokens = _tokens(logits, told[len(others) :].view(len(noisy), _NOISY_COLUMNS)) if here else told[:0]
    rows = logits.index_select(0, told[: len(others)]).float()
    # The bits of floats and of whole numbers side by side: a copy changes none.
    packed = to_host(torch.cat((tokens, rows.view(torch.int32).flatten()))).numpy()
    first = count if here else 0
    return packed[:first], packed[first:].view(np.float32).reshape(len(others), vocab)


def _record(draw: Draw, end: int, row: int) -> tuple[int, ...]:
    """A row that takes noise, in _NOISY_COLUMNS numbers below 2**32."""
    position = len(draw.history) + row - _rows_of(draw, end).start
    bits = int(np.float32(kernel_temperature(draw.params)).view(np.int32))
    return (row, *halves(draw.params.seed), *halves(position), bits)


def _upload(values: list[int], device: torch.device) -> Tensor:
    """Numbers below 2**32 as int32 of the same bits."""
    buffer = host_buffer(len(values), torch.int32, device)
    buffer.numpy()[:] = np.array(values, dtype=np.uint32).view(np.int32)
    return buffer.to(device, non_blocking=True)


def _tokens(logits: Tensor, noisy: Tensor) -> Tensor:
    """int32 [rows]: the likeliest of each row, the winner with noise of the rows that `noisy` [n, 6] says.

    NOTHING where a row's maximum is not finite. The first of equals wins: torch's argmax gives it.
    """
    rows = logits.float()
    highest = rows.amax(dim=1)  # a NaN wherever there is one
    tokens = rows.argmax(dim=1)
    step = max(1, _MOST // rows.shape[1])
    for some in torch.split(noisy, step) if len(noisy) else ():  # else one of no rows, to be compiled for
        at = some[:, 0]
        words = some[:, 1:5].long() & _LOW
        own = _winners(rows.index_select(0, at), highest.index_select(0, at), words, some[:, 5])
        tokens.index_copy_(0, at.long(), own)
    return torch.where(highest.isfinite(), tokens, NOTHING).to(torch.int32)


def _winners(rows: Tensor, highest: Tensor, words: Tensor, temperatures: Tensor) -> Tensor:
    """argmax of float64(scaled logit) + Gumbel noise, the first of equals; int64 [rows]."""
    # Both are tensors of the device: a division by a number of the host would be a product.
    scaled = (rows - highest[:, None]) / temperatures.contiguous().view(torch.float32)[:, None]
    drawn = _words_on(rows.device.type)(words[:, :2], words[:, 2:], rows.shape[1])
    return (scaled.double() + noise.gumbel(drawn)).argmax(dim=1)


@cache
def _words_on(kind: str) -> Words:
    """`row_words`, where torch can compile it as one kernel: whole numbers lose nothing by it."""
    if kind != "cuda" or importlib.util.find_spec("triton") is None:
        return noise.row_words
    return compiled_while_it_works(torch.compile(noise.row_words, dynamic=True), noise.row_words)


def compiled_while_it_works(compiled: Words, plain: Words) -> Words:
    """`compiled`, and from its first failure on `plain`, which gives the same; why is logged, once.

    torch compiles when it is first called, and again for other shapes: what it needs (Triton, an assembler, a
    C module, a cache that can be written) may then be missing. Memory that has run
    out, and a device that fails, are no such failures.
    """
    works = True

    def words(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
        nonlocal works
        if works:
            try:
                return compiled(seeds, positions, vocab)
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                raise
            except (RuntimeError, OSError) as error:  # torch's compiler raises both
                works = False
                _LOG.warning("noise cannot be compiled, and takes longer", error=str(error))
        return plain(seeds, positions, vocab)

    return words
