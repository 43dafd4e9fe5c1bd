"""Labels: the target's likeliest tokens at each place of the answers, with their probabilities.

A sampled answer shows one token a place; the target's distribution there shows them all, for one run over
the corpus (sequence-level against word-level distillation: Kim & Rush, arXiv 1606.07947).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from galley.distill.data.corpus import Corpus
from galley.distill.training.batches import batch_of, grouped
from galley.distill.training.student import Llama
from galley.distill.work import replacing

LABELS = 16
_BUDGET, _SHARD_GROUPS = 4096, 32


@dataclass(frozen=True, slots=True)
class Labels:
    """For each token of all answers end to end: rows of the draft's head and probabilities (0: no label)."""

    ids: NDArray[np.int32]  # [answer tokens, LABELS], likeliest first
    probs: NDArray[np.float16]  # [answer tokens, LABELS]

    def at(self, places: NDArray[np.int64], hardness: float) -> tuple[Tensor, Tensor]:
        """Return the labels of some places, `hardness` of each row's weight moved to its likeliest token."""
        probs = torch.from_numpy(self.probs[places].astype(np.float32))
        hard = probs.sum(1) * hardness
        probs = probs * (1 - hardness)
        probs[:, 0] += hard
        return torch.from_numpy(self.ids[places].astype(np.int64)), probs


def head_tokens(corpus: Corpus, vocab: int, rows: int, always: tuple[int, ...] = ()) -> NDArray[np.int64]:
    """Return the `rows` most frequent tokens of the answers, rising, those of `always` included."""
    counts = np.bincount(corpus.answers(), minlength=vocab)
    counts[list(always)] = counts.max() + 1
    return np.sort(np.argsort(-counts, kind="stable")[:rows])


def head_rows(tokens: NDArray[np.int64], vocab: int) -> NDArray[np.int64]:
    """Return for each token of the vocabulary its row of the head, or -1."""
    rows = np.full(vocab, -1)
    rows[tokens] = np.arange(len(tokens))
    return rows


def hard_labels(corpus: Corpus, rows: NDArray[np.int64]) -> Labels:
    """Return the corpus's own tokens as labels; tokens outside the head give none."""
    own = rows[corpus.answers()]
    ids = np.zeros((len(own), LABELS), np.int32)
    probs = np.zeros((len(own), LABELS), np.float16)
    ids[:, 0], probs[:, 0] = np.maximum(own, 0), own >= 0
    return Labels(ids, probs)


def score(
    corpus: Corpus,
    chosen: NDArray[np.int64],
    target: Llama,
    tokens: NDArray[np.int64],
    shards: Path,
    report: Callable[[int], None],
) -> None:
    """Let the target label the answers of the chosen conversations, into npz shards; existing ones are kept.

    Probabilities are renormalized over the head's tokens. `report` gets the conversations done so far.
    """
    shards.mkdir(parents=True, exist_ok=True)
    head = target.lm_head.weight[torch.from_numpy(tokens)]
    groups = grouped(corpus.lengths, chosen, _BUDGET)
    done = 0
    for number, first in enumerate(range(0, len(groups), _SHARD_GROUPS)):
        part = groups[first : first + _SHARD_GROUPS]
        path = shards / f"labels-{number:05d}.npz"
        if not path.exists():
            scored = [_score_group(corpus, group, target, head) for group in part]
            places, ids, probs = (np.concatenate(arrays) for arrays in zip(*scored, strict=True))
            with replacing(path) as unfinished, unfinished.open("wb") as file:
                np.savez(file, places=places, ids=ids, probs=probs)
        done += sum(map(len, part))
        report(done)


@torch.inference_mode()
def _score_group(
    corpus: Corpus, group: NDArray[np.int64], target: Llama, head: Tensor
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float16]]:
    batch = batch_of(corpus, group)
    with torch.autocast("cpu", torch.bfloat16, enabled=head.dtype == torch.bfloat16):
        states = target.states(batch.tokens, batch.rows).to(head.dtype)
    logits = (states @ head.T).float()  # [answers, head rows]
    likely = logits.topk(min(LABELS, logits.shape[1]))
    probs = (likely.values - logits.logsumexp(-1, keepdim=True)).exp()
    return batch.places, likely.indices.numpy().astype(np.int32), probs.numpy().astype(np.float16)


def with_scored(labels: Labels, shards: Path) -> Labels:
    """Return the labels with those of the shards in place.

    Where the corpus's own token lies outside the head there is no label: the draft cannot propose it.
    """
    ids, probs = labels.ids.copy(), labels.probs.copy()
    for path in sorted(shards.glob("labels-*.npz")):
        with np.load(path, allow_pickle=False) as stored:
            places = stored["places"]
            inside = probs[places, :1] > 0
            width = stored["ids"].shape[1]
            ids[places, :width], probs[places, :width] = stored["ids"], stored["probs"] * inside
    return Labels(ids, probs)
