"""Measure the first, second and further draft tokens, with the target's states and without.

Drafts are fed the target's answers (galley/distill/training/evaluation.py). All drafts are measured at the
same places, with the same noise, at each temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from galley.distill.data.corpus import Batch, Corpus, batch_of, grouped
from galley.distill.features.collection import Collected
from galley.distill.features.draft import FeatureDraft
from galley.distill.training.evaluation import ROUND_K, Bools
from galley.distill.training.models import Llama

TEMPERATURES = (0.0, 0.7, 1.0)
FEATURES, LOST, PRESENT = "features", "lost", "present"
"""Names of what is measured: the draft with the target's states, without any, and another draft."""
_BUDGET, _ROWS = 4096, 512


@dataclass(frozen=True, slots=True)
class Guesses:
    """A draft's states [answer tokens, hidden] at each depth, and its head. The last one stands for later."""

    states: Sequence[Tensor]
    head: Tensor  # [head rows, hidden]
    tokens: Tensor  # [head rows]


@dataclass(frozen=True, slots=True)
class Depths:
    """Shares of draft tokens that equal the target's, by depth, on one workload at one temperature.

    At temperature 0 over greedy answers, otherwise over all. `accepted_per_round` is the mean number accepted
    in a round of ROUND_K draft tokens.
    """

    tokens: int
    by_depth: tuple[float, ...]
    accepted_per_round: float


Measured = dict[str, dict[str, dict[str, Depths]]]
"""By what is measured, temperature and workload."""


def guesses_of(
    draft: FeatureDraft, heads: NDArray[np.int64], held: Collected, dtype: torch.dtype, *, known: bool
) -> Guesses:
    """Return what a feature draft says at each answer place, with the target's states or without."""

    def states(batch: Batch) -> list[Tensor]:
        given = held.given(batch) if known else None
        return draft.unrolled(batch.tokens, batch.rows, given, ROUND_K)

    return _guesses(draft, heads, held.corpus, states, dtype)


def plain_guesses(draft: Llama, heads: NDArray[np.int64], corpus: Corpus, dtype: torch.dtype) -> Guesses:
    return _guesses(draft, heads, corpus, lambda batch: [draft.states(batch.tokens, batch.rows)], dtype)


@torch.inference_mode()
def _guesses(
    draft: Llama,
    heads: NDArray[np.int64],
    corpus: Corpus,
    states_of: Callable[[Batch], list[Tensor]],
    dtype: torch.dtype,
) -> Guesses:
    parts, places = [], []
    for group in grouped(corpus.lengths, np.arange(len(corpus)), _BUDGET):
        batch = batch_of(corpus, group)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            parts.append([states.to(dtype) for states in states_of(batch)])
        places.append(batch.places)
    order = torch.from_numpy(np.concatenate(places).argsort())
    by_depth = [torch.cat(of_depth)[order] for of_depth in zip(*parts, strict=True)]
    return Guesses(by_depth, draft.lm_head.weight.detach().to(dtype), torch.from_numpy(heads))


@torch.inference_mode()
def measure(
    corpus: Corpus, outputs: Tensor, head: Tensor, drafts: dict[str, Guesses], seed: int = 0
) -> Measured:
    """Return shares of the target's choices that drafts guess; noise is a function of `seed`.

    `outputs` [answer tokens, hidden] and `head` [vocab, hidden] are the target's.
    """
    source = torch.Generator().manual_seed(seed)
    hits = {name: np.zeros((len(TEMPERATURES), ROUND_K, len(outputs)), np.bool_) for name in drafts}
    for first in range(0, len(outputs), _ROWS):
        places = slice(first, first + _ROWS)
        logits = (outputs[places].to(head.dtype) @ head.T).float()
        noise = -torch.empty_like(logits).exponential_(generator=source).log_()
        theirs = [_choices(logits, noise, temperature) for temperature in TEMPERATURES]
        for name, draft in drafts.items():
            same_noise = noise[:, draft.tokens]
            for depth, states in enumerate(draft.states):
                ours = (states[places] @ draft.head.T).float()
                for row, temperature in enumerate(TEMPERATURES):
                    guessed = draft.tokens[_choices(ours, same_noise, temperature)]
                    hits[name][row, depth:, places] = (guessed == theirs[row]).numpy()
    return {
        name: {
            f"{temperature:g}": _by_workload(corpus, by_depth, greedy_only=temperature == 0)
            for temperature, by_depth in zip(TEMPERATURES, of_it, strict=True)
        }
        for name, of_it in hits.items()
    }


def _choices(logits: Tensor, noise: Tensor, temperature: float) -> Tensor:
    return (logits if temperature == 0 else logits / temperature + noise).argmax(1)


def _by_workload(corpus: Corpus, hits: Bools, *, greedy_only: bool) -> dict[str, Depths]:
    measured = corpus.temperature == 0 if greedy_only else np.ones(len(corpus), np.bool_)
    chosen = {name: measured & (corpus.workload == i) for i, name in enumerate(corpus.workload_names)}
    return {
        name: _depths(corpus, of_it, hits)
        for name, of_it in (*chosen.items(), ("all", measured))
        if of_it.any()
    }


def _depths(corpus: Corpus, chosen: Bools, hits: Bools) -> Depths:
    ends = corpus.answer_offsets
    answers = [hits[:, ends[i] : ends[i + 1]] for i in np.flatnonzero(chosen).tolist()]
    # Places that a draft token of every depth can have.
    same = np.concatenate([of_it[:, min(ROUND_K, of_it.shape[1]) - 1 :] for of_it in answers], 1)
    rounds = [taken for of_it in answers for taken in _rounds(of_it)]
    return Depths(
        tokens=same.shape[1],
        by_depth=tuple(round(float(share), 4) for share in same.mean(1)),
        accepted_per_round=round(float(np.mean(rounds)), 4),
    )


def _rounds(hits: Bools) -> list[int]:
    """Return the draft tokens accepted in each round of an answer; a round adds one token of the target."""
    accepted, at = [], 0
    while at < hits.shape[1]:
        in_a_row = hits.diagonal(at)
        misses = np.flatnonzero(~in_a_row)
        accepted.append(int(misses[0]) if len(misses) else len(in_a_row))
        at += accepted[-1] + 1
    return accepted


def as_table(measured: Measured) -> dict[str, Any]:
    return {
        name: {
            temperature: {workload: asdict(depths) for workload, depths in by_workload.items()}
            for temperature, by_workload in of_it.items()
        }
        for name, of_it in measured.items()
    }
