"""Measure how many draft tokens the target would accept, on answers that the draft was not trained on.

The draft is fed the target's answers (teacher forcing). For greedy answers that is what a running system
sees: a draft token counts only if all before it in its round were accepted, so its context is the target's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from galley.distill.data.corpus import Corpus, batch_of, grouped
from galley.distill.training.models import Llama

Bools = NDArray[np.bool_]

TEMPERATURE = 0.7
ROUND_K = 4
_BUDGET, _ROWS = 4096, 512


@dataclass(frozen=True, slots=True)
class Reference:
    """The target's output at each place of the held-out answers; its states stand for its distribution."""

    states: Tensor  # [answer tokens, hidden]
    head: Tensor  # [vocab, hidden]

    def logits(self, places: slice) -> Tensor:
        """Return the target's logits [rows, vocab] at some places."""
        return (self.states[places] @ self.head.T).float()


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Shares of draft tokens accepted on one workload's held-out answers.

    `greedy`: agreement with the target's likeliest token over greedy answers, at least one.
    `accepted_per_round`: draft tokens accepted in a round of ROUND_K over the same. `any_greedy`: agreement
    over all answers. `sampled`: over all, both at TEMPERATURE with the same Gumbel noise (arXiv 2408.07978).
    """

    tokens: int
    greedy: float
    accepted_per_round: float
    any_greedy: float
    sampled: float


class Reports(Protocol):
    """A receiver of progress, called by the thread that works: the command prints it, tests collect it."""

    def stage(self, name: str, total: int) -> None: ...

    def done(self, units: int, note: str = "") -> None:
        """Set how many units of the stage are done."""

    def measured(self, seen: int, acceptance: dict[str, Acceptance]) -> None:
        """Report the acceptance after `seen` answer tokens."""


@torch.inference_mode()
def reference_of(corpus: Corpus, target: Llama, report: Callable[[int], None]) -> Reference:
    """Run the target over the held-out answers; `report` gets the conversations done so far."""
    head = target.lm_head.weight
    states = torch.empty(int(corpus.answer_len.sum()), head.shape[1], dtype=head.dtype)
    _fill(states, corpus, target, report)
    return Reference(states, head)


def _fill(states: Tensor, corpus: Corpus, model: Llama, report: Callable[[int], None]) -> None:
    done = 0
    for group in grouped(corpus.lengths, np.arange(len(corpus)), _BUDGET):
        batch = batch_of(corpus, group)
        with torch.autocast("cpu", torch.bfloat16, enabled=states.dtype == torch.bfloat16):
            computed = model.states(batch.tokens, batch.rows)
        states[torch.from_numpy(batch.places)] = computed.to(states.dtype)
        done += len(group)
        report(done)


@torch.inference_mode()
def evaluate(
    corpus: Corpus, reference: Reference, student: Llama, heads: NDArray[np.int64], seed: int = 0
) -> dict[str, Acceptance]:
    """Return the acceptance of a draft by workload, and of "all"; noise is a function of `seed`.

    A workload without a held-out greedy answer is in "all" only.
    """
    states = torch.empty_like(reference.states)
    _fill(states, corpus, student, lambda _: None)
    head, tokens = student.lm_head.weight.to(states.dtype), torch.from_numpy(heads)
    source = torch.Generator().manual_seed(seed)
    same: list[Bools] = []
    drawn: list[Bools] = []
    for first in range(0, len(states), _ROWS):
        places = slice(first, first + _ROWS)
        theirs, ours = reference.logits(places), (states[places] @ head.T).float()
        same.append((tokens[ours.argmax(1)] == theirs.argmax(1)).numpy())
        noise = -torch.empty_like(theirs).exponential_(generator=source).log_()
        ours.div_(TEMPERATURE).add_(noise[:, tokens])
        drawn.append((tokens[ours.argmax(1)] == theirs.div_(TEMPERATURE).add_(noise).argmax(1)).numpy())
    return _by_workload(corpus, np.concatenate(same), np.concatenate(drawn))


@torch.inference_mode()
def agreement(corpus: Corpus, draft: Llama, heads: NDArray[np.int64], dtype: torch.dtype) -> Bools:
    """Return for each token of all answers whether it is the draft's likeliest, given those before it."""
    head, tokens = draft.lm_head.weight.to(dtype), torch.from_numpy(heads)
    states = torch.empty(int(corpus.answer_len.sum()), head.shape[1], dtype=dtype)
    _fill(states, corpus, draft, lambda _: None)
    answers = torch.from_numpy(corpus.answers())
    same = [
        (tokens[(states[first : first + _ROWS] @ head.T).argmax(1)] == answers[first : first + _ROWS]).numpy()
        for first in range(0, len(states), _ROWS)
    ]
    return np.concatenate(same)


def _by_workload(corpus: Corpus, same: Bools, drawn: Bools) -> dict[str, Acceptance]:
    everyone, greedy = np.ones(len(corpus), np.bool_), corpus.temperature == 0
    chosen = {name: corpus.workload == index for index, name in enumerate(corpus.workload_names)}
    named = {name: of_it for name, of_it in chosen.items() if (of_it & greedy).any()} | {"all": everyone}
    return {name: _acceptance(corpus, of_it, same, drawn) for name, of_it in named.items()}


def _acceptance(corpus: Corpus, chosen: Bools, same: Bools, drawn: Bools) -> Acceptance:
    ends = corpus.answer_offsets
    greedy = [
        same[ends[i] : ends[i + 1]] for i in np.flatnonzero(chosen & (corpus.temperature == 0)).tolist()
    ]
    mine = np.repeat(chosen, corpus.answer_len)
    return Acceptance(
        tokens=int(mine.sum()),
        greedy=_mean(np.concatenate(greedy)),
        accepted_per_round=_per_round(greedy),
        any_greedy=_mean(same[mine]),
        sampled=_mean(drawn[mine]),
    )


def _mean(hits: Bools) -> float:
    return round(float(hits.mean()), 4)


def _per_round(answers: list[Bools], k: int = ROUND_K) -> float:
    """Return draft tokens accepted a round of at most k; each round adds one token of the target."""
    rounds = accepted = 0
    for hits in answers:
        at = 0
        while at < len(hits):
            taken = _run(hits[at : at + k])
            rounds, accepted, at = rounds + 1, accepted + taken, at + taken + 1
    return round(accepted / rounds, 4)


def _run(hits: Bools) -> int:
    misses = np.flatnonzero(~hits)
    return int(misses[0]) if len(misses) else len(hits)


def as_table(acceptance: dict[str, Acceptance]) -> dict[str, dict[str, Any]]:
    return {name: asdict(one) for name, one in acceptance.items()}
