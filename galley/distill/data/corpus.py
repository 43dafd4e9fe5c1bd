"""The corpus (prompts with the target's own answers) and its batches, whose order depends on a seed alone."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from galley.core.errors import InvalidField
from galley.distill.work import replacing

_ARRAYS = ("ids", "offsets", "prompt_len", "workload", "workload_names", "temperature")
# Kinds of numpy types; integers for all others.
_KINDS = {"workload_names": "U", "temperature": "fiu"}
# Errors of numpy, zipfile and zlib for a damaged file or one of another kind.
_UNREADABLE = (OSError, ValueError, EOFError, TypeError, RuntimeError, zipfile.BadZipFile, zlib.error)
# Conversations sorted by length together: enough to pad little, few enough to mix well.
_POOL = 256


class Conversation(NamedTuple):
    """A prompt and the target's answer to it, end to end; `temperature` is that of the answer."""

    tokens: Sequence[int] | NDArray[np.int64]
    prompt_len: int
    workload: str
    temperature: float


@dataclass(frozen=True, slots=True)
class Corpus:
    """N conversations end to end; conversation i is ids[offsets[i]:offsets[i + 1]], prompt then answer.

    `temperature` is that of its answer; `workload` an index into `workload_names`.
    """

    ids: NDArray[np.int64]  # [tokens]
    offsets: NDArray[np.int64]  # [N + 1]
    prompt_len: NDArray[np.int64]  # [N]
    workload: NDArray[np.int64]  # [N]
    workload_names: tuple[str, ...]
    temperature: NDArray[np.float32]  # [N]

    def __len__(self) -> int:
        return len(self.prompt_len)

    def __getitem__(self, index: int) -> Conversation:
        workload = self.workload_names[self.workload[index]]
        return Conversation(
            self.tokens(index), int(self.prompt_len[index]), workload, float(self.temperature[index])
        )

    def __iter__(self) -> Iterator[Conversation]:
        return (self[index] for index in range(len(self)))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens of each conversation."""
        return np.diff(self.offsets)

    @property
    def answer_len(self) -> NDArray[np.int64]:
        return self.lengths - self.prompt_len

    @property
    def answer_offsets(self) -> NDArray[np.int64]:
        """Return where each answer starts among all answers' tokens end to end, and their sum: [N + 1]."""
        return np.concatenate([[0], np.cumsum(self.answer_len)])

    def tokens(self, index: int) -> NDArray[np.int64]:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    def refuse_beyond(self, vocab: int) -> None:
        if not 0 <= int(self.ids.min()) <= int(self.ids.max()) < vocab:
            raise InvalidField("corpus", f"tokens must be in [0, {vocab}), the target's vocabulary")

    def answers(self) -> NDArray[np.int64]:
        """Return all answers' tokens end to end."""
        places = np.arange(len(self.ids)) - np.repeat(self.offsets[:-1], self.lengths)
        return self.ids[places >= np.repeat(self.prompt_len, self.lengths)]

    def ranks(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return for some of all answers' tokens the number of tokens before them in their answer."""
        starts = self.answer_offsets
        ranks: NDArray[np.int64] = places - starts[np.searchsorted(starts, places, "right") - 1]
        return ranks

    def part(self, chosen: NDArray[np.int64]) -> Corpus:
        """Return the corpus of some conversations, in the order given."""
        return corpus_of([self[index] for index in chosen.tolist()])


def read_corpus(path: Path) -> Corpus:
    """Return the corpus in an npz file. Raise InvalidField if it cannot be read or its arrays do not fit."""
    arrays = _arrays(path)
    for name, array in arrays.items():
        if array.ndim != 1 or array.dtype.kind not in _KINDS.get(name, "iu"):
            raise InvalidField(
                "corpus", f"{path}: {name} must be [n] of its type, got {array.dtype} {list(array.shape)}"
            )
    names = tuple(str(name) for name in arrays["workload_names"])
    ids, offsets, prompt_len, workload = (arrays[name].astype(np.int64) for name in _ARRAYS[:4])
    corpus = Corpus(ids, offsets, prompt_len, workload, names, arrays["temperature"].astype(np.float32))
    _refuse_broken(corpus, path)
    return corpus


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    try:
        # Opened here: np.load() leaves a damaged zip open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            missing = [name for name in _ARRAYS if name not in stored]
            if missing:
                raise InvalidField("corpus", f"{path}: must have an array {missing[0]!r}")
            return {name: stored[name] for name in _ARRAYS}
    except _UNREADABLE as error:
        raise InvalidField("corpus", f"{path}: cannot be read: {error}") from error


def _refuse_broken(corpus: Corpus, path: Path) -> None:
    count = len(corpus)
    if not count == len(corpus.workload) == len(corpus.temperature) == len(corpus.offsets) - 1:
        raise InvalidField("corpus", f"{path}: arrays must have {count} entries, offsets {count + 1}")
    if count == 0 or corpus.offsets[0] != 0 or corpus.offsets[-1] != len(corpus.ids):
        raise InvalidField("corpus", f"{path}: offsets must cover the {len(corpus.ids)} ids, from 0 on")
    if corpus.prompt_len.min() < 1 or corpus.answer_len.min() < 1:
        raise InvalidField("corpus", f"{path}: prompts and answers must not be empty")
    if not 0 <= corpus.workload.min() <= corpus.workload.max() < len(corpus.workload_names):
        raise InvalidField("corpus", f"{path}: workload must hold indices into workload_names")


def corpus_of(conversations: Sequence[Conversation]) -> Corpus:
    tokens, prompt_len, workloads, temperature = zip(*conversations, strict=True)
    names = tuple(sorted(set(workloads)))
    index = {name: place for place, name in enumerate(names)}
    return Corpus(
        ids=np.concatenate([np.asarray(one, np.int64) for one in tokens]),
        offsets=np.cumsum([0, *map(len, tokens)]),
        prompt_len=np.array(prompt_len),
        workload=np.array([index[name] for name in workloads]),
        workload_names=names,
        temperature=np.array(temperature, np.float32),
    )


def write_corpus(corpus: Corpus, path: Path) -> None:
    """Store a corpus as npz, whole or not at all."""
    with replacing(path) as unfinished, unfinished.open("wb") as file:
        np.savez_compressed(
            file,
            ids=_narrow(corpus.ids),
            offsets=corpus.offsets,
            prompt_len=corpus.prompt_len.astype(np.uint32),
            workload=_narrow(corpus.workload),
            workload_names=np.array(corpus.workload_names),
            temperature=corpus.temperature,
        )


def _narrow(numbers: NDArray[np.int64]) -> NDArray[Any]:
    return numbers.astype(np.uint16 if numbers.max() < 1 << 16 else np.uint32)


@dataclass(frozen=True, slots=True)
class Batch:
    """Some conversations, padded at the end, and where their answers are predicted."""

    tokens: Tensor  # [batch, length]
    rows: Tensor  # of the flattened [batch * length]: those whose next token is an answer's, [answers]
    places: NDArray[np.int64]  # of the same tokens among all answers' tokens end to end, [answers]
    conversations: NDArray[np.int64]  # places in the corpus, [batch]


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
    """Return the groups of one epoch over all conversations; each epoch has another order."""
    source = np.random.default_rng([seed, epoch])
    groups = grouped(lengths, source.permutation(len(lengths)), budget)
    return [groups[place] for place in source.permutation(len(groups))]


def batch_of(corpus: Corpus, group: NDArray[np.int64]) -> Batch:
    """Return a group as a batch. The last token of each conversation is predicted, but never fed."""
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
    return Batch(
        torch.from_numpy(tokens), torch.from_numpy(np.concatenate(rows)), np.concatenate(places), group
    )


def batches(
    corpus: Corpus, *, budget: int, seed: int, epoch: int = 0, skip: int = 0
) -> Iterator[tuple[int, int, Batch]]:
    """Yield forever, from the epoch's batch `skip` on: (epoch, place of the next batch, batch)."""
    while True:
        groups = epoch_groups(corpus.lengths, budget, seed, epoch)
        for place in range(skip, len(groups)):
            yield epoch, place + 1, batch_of(corpus, groups[place])
        epoch, skip = epoch + 1, 0
