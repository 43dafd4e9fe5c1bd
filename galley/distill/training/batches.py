"""Cut a corpus into batches: the same for a seed, from any step on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from galley.distill.data.corpus import Corpus

# Conversations sorted by length together: enough to pad little, few enough to mix well.
_POOL = 256


@dataclass(frozen=True, slots=True)
class Batch:
    """Some conversations, padded at the end, and where their answers are predicted."""

    tokens: Tensor  # [batch, length]
    rows: Tensor  # of the flattened [batch * length]: those whose next token is an answer's, [answers]
    places: NDArray[np.int64]  # of the same tokens among all answers' tokens end to end, [answers]


def grouped(lengths: NDArray[np.int64], order: NDArray[np.int64], budget: int) -> list[NDArray[np.int64]]:
    """Return conversations in groups of at most `budget` tokens, padding included, but at least one each."""
    groups = []
    for first in range(0, len(order), _POOL):
        pool = order[first : first + _POOL]
        pool = pool[np.argsort(lengths[pool], kind="stable")]
        start = 0
        for end in range(1, len(pool) + 1):
            fits = end < len(pool) and lengths[pool[end]] * (end + 1 - start) <= budget
            if not fits:
                groups.append(pool[start:end])
                start = end
    return groups


def epoch_groups(lengths: NDArray[np.int64], budget: int, seed: int, epoch: int) -> list[NDArray[np.int64]]:
    """Return the groups of one epoch over all conversations, in an order of its own."""
    source = np.random.default_rng([seed, epoch])
    groups = grouped(lengths, source.permutation(len(lengths)), budget)
    return [groups[place] for place in source.permutation(len(groups))]


def batch_of(corpus: Corpus, group: NDArray[np.int64]) -> Batch:
    """Return the batch of some conversations; the last token of each is predicted, never fed."""
    lengths = corpus.lengths[group]
    longest = int(lengths.max()) - 1
    tokens = np.zeros((len(group), longest), np.int64)
    rows, places = [], []
    answer_offsets = corpus.answer_offsets
    for row, index in enumerate(group):
        conversation = corpus.tokens(index)
        tokens[row, : len(conversation) - 1] = conversation[:-1]
        first = int(corpus.prompt_len[index]) - 1
        rows.append(row * longest + np.arange(first, len(conversation) - 1))
        places.append(np.arange(answer_offsets[index], answer_offsets[index + 1]))
    return Batch(torch.from_numpy(tokens), torch.from_numpy(np.concatenate(rows)), np.concatenate(places))


def batches(
    corpus: Corpus, *, budget: int, seed: int, epoch: int = 0, skip: int = 0
) -> Iterator[tuple[int, int, Batch]]:
    """Yield forever, from the epoch's batch `skip` on: (epoch, place of the next batch, batch)."""
    while True:
        groups = epoch_groups(corpus.lengths, budget, seed, epoch)
        for place in range(skip, len(groups)):
            yield epoch, place + 1, batch_of(corpus, groups[place])
        epoch, skip = epoch + 1, 0
