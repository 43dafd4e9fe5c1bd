"""Sample on the logits' device: for most draws the host gets only the tokens, in one transfer.

The rows of a draw that `is_drawn_here` are sampled on the device, all at once, those of a tree too. None
depends on the draft tokens before it, but for their number, so acceptance can be decided afterwards. The rows
of all other draws come to the host in the same transfer and are sampled there. The results are those of
galley/engine/sampling/draw.py; the noise uses the device's logarithms and agrees to 1e-6 with the host's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from galley.common.logs import get_logger
from galley.core.noise import GUMBEL, LANES, MULTIPLIERS, ROUNDS, WEYL, halves
from galley.core.step import Draw, Sampled
from galley.core.trees import ROOT, child_of, depths
from galley.engine.cuda.device import host_buffer, to_host
from galley.engine.sampling.allowed import constrain
from galley.engine.sampling.draw import Outcome, draw_rows
from galley.engine.sampling.layout import NOTHING, Floats, is_plain, kernel_temperature, no_maximum

Words = Callable[[Tensor, Tensor, int], Tensor]

_LOG = get_logger(__name__)

# Numbers processed at once: each takes some tens of bytes.
_CHUNK = 2**24
_LOW = 0xFFFFFFFF
# A row that needs noise: its index, seed and position as two halves each, the temperature's bits.
_NOISY_COLUMNS = 6


def is_drawn_here(draw: Draw) -> bool:
    """Return True if each token depends on its row, mask, temperature, seed and position alone."""
    params = draw.params
    unfiltered = params.top_k == 0 and params.top_p >= 1.0 and params.min_p <= 0.0
    return is_plain(draw) and (params.is_greedy or unfiltered)


def draw_all(logits: Tensor, draws: Sequence[Draw]) -> list[Outcome]:
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
    """Keep the tokens from the first row on until no draft token has the last, or before a bad row."""
    kept: list[int] = []
    node: int | None = ROOT
    while node is not None and (token := tokens[node + 1]) != NOTHING:
        kept.append(token)
        node = child_of(draw.draft_tokens, draw.parents, node, token)
    return Sampled(tuple(kept)) if kept else no_maximum(draw)


def _fetch(
    logits: Tensor, here: Sequence[tuple[Draw, int]], others: list[int]
) -> tuple[np.ndarray[Any, np.dtype[np.int32]], Floats]:
    """Return on the host each row's token, valid for draws `here`, and the logits of the rows `others`."""
    noisy = [record for pair in here if not pair[0].params.is_greedy for record in _records(*pair)]
    uploaded = _upload([*others, *(number for record in noisy for number in record)], logits.device)
    count, vocab = logits.shape
    tokens = uploaded[:0]
    if here:
        own = constrain(logits, [draw for draw, _ in here], [_rows_of(*pair).start for pair in here])
        tokens = _tokens(own, uploaded[len(others) :].view(len(noisy), _NOISY_COLUMNS))
    rows = logits.index_select(0, uploaded[: len(others)]).float()
    # Bits of floats and integers in one buffer: a copy changes none.
    packed = to_host(torch.cat((tokens, rows.view(torch.int32).flatten()))).numpy()
    first = count if here else 0
    return packed[:first], packed[first:].view(np.float32).reshape(len(others), vocab)


def _records(draw: Draw, end: int) -> Iterator[tuple[int, ...]]:
    """Yield each row of a draw that needs noise, as _NOISY_COLUMNS numbers below 2**32."""
    bits = int(np.float32(kernel_temperature(draw.params)).view(np.int32))
    before = (-1, *depths(draw.parents, len(draw.draft_tokens)))
    for row, depth in zip(_rows_of(draw, end), before, strict=True):
        yield (row, *halves(draw.params.seed), *halves(len(draw.history) + depth + 1), bits)


def _upload(values: list[int], device: torch.device) -> Tensor:
    buffer = host_buffer(len(values), torch.int32, device)
    buffer.numpy()[:] = np.array(values, dtype=np.uint32).view(np.int32)
    return buffer.to(device, non_blocking=True)


def _tokens(rows: Tensor, noisy: Tensor) -> Tensor:
    """Return int32 [rows]: each row's likeliest token, or for rows of `noisy` [n, 6] its winner with noise.

    NOTHING where a row's maximum is not finite. The first of equals wins, as torch's argmax does.
    """
    highest = rows.amax(dim=1)  # NaN if there is one
    tokens = rows.argmax(dim=1)
    step = max(1, _CHUNK // rows.shape[1])
    for some in torch.split(noisy, step) if len(noisy) else ():  # else torch would compile for no rows
        at = some[:, 0]
        words = some[:, 1:5].long() & _LOW
        own = _winners(rows.index_select(0, at), highest.index_select(0, at), words, some[:, 5])
        tokens.index_copy_(0, at.long(), own)
    return torch.where(highest.isfinite(), tokens, NOTHING).to(torch.int32)


def _winners(rows: Tensor, highest: Tensor, words: Tensor, temperatures: Tensor) -> Tensor:
    """Return argmax of float64(scaled logit) + Gumbel noise, the first of equals; int64 [rows]."""
    # Both are tensors of the device: a division by a host number would become a product.
    scaled = (rows - highest[:, None]) / temperatures.contiguous().view(torch.float32)[:, None]
    drawn = _words_on(rows.device.type)(words[:, :2], words[:, 2:], rows.shape[1])
    return (scaled.double() + gumbel(drawn)).argmax(dim=1)


@cache
def _words_on(kind: str) -> Words:
    """Return `row_words`, compiled as one kernel where torch can; integers lose nothing by it."""
    if kind != "cuda" or importlib.util.find_spec("triton") is None:
        return row_words
    return compiled_while_it_works(torch.compile(row_words, dynamic=True), row_words)


def row_words(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Return the words of galley/core/noise.py of the tokens [0, vocab) for each row; int64 [rows, vocab].

    `seeds` and `positions` are int64 [rows, 2]: the low and the high 32 bits. torch has no uint64 arithmetic,
    so the 32-bit lanes live in int64, whose products wrap: a mask after the (arithmetic) shift makes their
    high half non-negative.
    """
    blocks = torch.arange(-(-vocab // LANES), device=seeds.device)[None]  # [1, blocks]
    low, high = seeds[:, :1], seeds[:, 1:]  # [rows, 1]
    c0, c1, c2, c3 = blocks, positions[:, :1], positions[:, 1:], torch.full_like(blocks, GUMBEL)
    for i in range(ROUNDS):
        k0, k1 = (low + i * WEYL[0]) & _LOW, (high + i * WEYL[1]) & _LOW
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = ((p1 >> 32) & _LOW) ^ c1 ^ k0, p1 & _LOW
        c2, c3 = ((p0 >> 32) & _LOW) ^ c3 ^ k1, p0 & _LOW
    return torch.stack((c0, c1, c2, c3), dim=-1).flatten(1)[:, :vocab]


def gumbel(words: Tensor) -> Tensor:
    t = (words.to(torch.float64) + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-t))


def compiled_while_it_works(compiled: Words, plain: Words) -> Words:
    """Return a function that calls `compiled` until that fails, and then `plain`. Logs the failure once.

    Triton, an assembler or a writable cache may be missing. Out of memory and device errors are raised.
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
                _LOG.warning("noise not compiled; sampling is slower", error=str(error))
        return plain(seeds, positions, vocab)

    return words
