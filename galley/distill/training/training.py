"""The training loop: batches, loss, AdamW, and checkpoints from which it continues as if never stopped.

Labels are the target's likeliest tokens at each place of the answers, with their probabilities: a sampled
answer shows one token a place; the target's distribution there shows them all, for one run over the corpus
(sequence-level against word-level distillation: Kim & Rush, arXiv 1606.07947).
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from galley.core.errors import InvalidField
from galley.distill.data.corpus import Batch, Corpus, batch_of, batches, grouped
from galley.distill.training.models import Llama
from galley.distill.work import refuse_other, replacing

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

    A token outside the head gets no label: the draft cannot propose it.
    """
    ids, probs = labels.ids.copy(), labels.probs.copy()
    for path in sorted(shards.glob("labels-*.npz")):
        with np.load(path, allow_pickle=False) as stored:
            places = stored["places"]
            inside = probs[places, :1] > 0
            width = stored["ids"].shape[1]
            ids[places, :width], probs[places, :width] = stored["ids"], stored["probs"] * inside
    return Labels(ids, probs)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Length and rate of a training of `answer_tokens`; the rate falls over their last `decay_share`."""

    answer_tokens: int
    batch_tokens: int = 2048
    rate: float = 1e-3
    warm_up_steps: int = 40
    decay_share: float = 0.5
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 1

    def rate_at(self, step: int, seen: int) -> float:
        """Return the learning rate: linear warm-up, then constant, then linear to 0."""
        left = max(0.0, 1 - seen / self.answer_tokens) / self.decay_share
        return self.rate * min(1.0, (step + 1) / self.warm_up_steps, left)


@dataclass(frozen=True, slots=True)
class Progress:
    """Steps and answer tokens so far, the place of the next batch, and rows and loss of the last one."""

    step: int = 0
    seen: int = 0
    epoch: int = 0
    batch: int = 0
    batch_rows: int = 0
    loss: float = 0.0
    train_s: float = 0.0


LossOf = Callable[[Batch, int], Tensor]
"""The loss of a batch, at a number of steps."""


class Training:
    def __init__(self, student: nn.Module, schedule: Schedule) -> None:
        self.student = student
        self.schedule = schedule
        self.progress = Progress()
        self.optimizer = torch.optim.AdamW(
            student.parameters(),
            lr=schedule.rate,
            betas=(0.9, 0.95),
            weight_decay=schedule.weight_decay,
            fused=True,
        )

    def run(self, corpus: Corpus, loss_of: LossOf, report: Callable[[Progress], None]) -> None:
        at, schedule = self.progress, self.schedule
        if at.seen >= schedule.answer_tokens:
            return
        stream = batches(
            corpus, budget=schedule.batch_tokens, seed=schedule.seed, epoch=at.epoch, skip=at.batch
        )
        for epoch, place, batch in stream:
            started = time.perf_counter()
            loss = self._step(loss_of, batch)
            at = self.progress
            self.progress = Progress(
                at.step + 1,
                at.seen + len(batch.rows),
                epoch,
                place,
                len(batch.rows),
                loss,
                at.train_s + time.perf_counter() - started,
            )
            report(self.progress)
            if self.progress.seen >= schedule.answer_tokens:
                return

    def save(self, path: Path, identity: dict[str, Any]) -> None:
        """Store a checkpoint that only a run of the same `identity` continues."""
        state = {"weights": self.student.state_dict(), "optimizer": self.optimizer.state_dict()}
        with replacing(path) as unfinished:
            torch.save({"about": identity, "progress": asdict(self.progress), **state}, unfinished)

    def load(self, path: Path, identity: dict[str, Any]) -> None:
        """Continue from a checkpoint. Raise InvalidField if it cannot be read or belongs to another run."""
        try:
            stored = torch.load(path, weights_only=True)
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise InvalidField("work", f"{path}: cannot be read: {error}") from error
        refuse_other(stored["about"], identity, path)
        self.student.load_state_dict(stored["weights"])
        self.optimizer.load_state_dict(stored["optimizer"])
        self.progress = Progress(**stored["progress"])

    def _step(self, loss_of: LossOf, batch: Batch) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.rate_at(self.progress.step, self.progress.seen)
        loss = loss_of(batch, self.progress.step)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has none
        clip_grad_norm_(self.student.parameters(), self.schedule.clip)
        self.optimizer.step()
        return loss.item()


def label_loss(student: Llama, labels: Labels, hardness: float, dtype: torch.dtype) -> LossOf:
    """Return the loss of a draft against the labels of each answer's places."""

    def loss_of(batch: Batch, _: int) -> Tensor:
        ids, probs = labels.at(batch.places, hardness)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            states = student.states(batch.tokens, batch.rows)
        return distilled(states.to(dtype), student.lm_head.weight, ids, probs)

    return loss_of


class _Distilled(torch.autograd.Function):
    """A loss whose forward computes both gradients: it reads a large head's logits once, not four times."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
        narrow = head.to(states.dtype)
        logits = (states @ narrow.T).float()  # [rows, head]
        log_z = torch.logsumexp(logits, -1, keepdim=True)
        loss = (probs * (log_z - logits.gather(1, ids))).sum() / len(states)
        push = logits.sub_(log_z).exp_().mul_(probs.sum(1, keepdim=True))  # towards q, away from p
        push.scatter_add_(1, ids, -probs)
        push = push.div_(len(states)).to(states.dtype)
        ctx.save_for_backward(push @ narrow, (push.T @ states).to(head.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        states, head = ctx.saved_tensors
        return states * grads[0].to(states.dtype), head * grads[0], None, None


def distilled(states: Tensor, head: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    """Return the mean over rows of -sum p log q: the draft's q against the target's p, up to p's entropy.

    states [rows, hidden]; head [head_rows, hidden]; ids [rows, labels] rows of the head; probs [rows,
    labels] their probabilities in the target, 0 for no label. (Hinton et al., arXiv 1503.02531.)
    """
    loss: Tensor = _Distilled.apply(states, head, ids, probs)  # type: ignore[no-untyped-call]  # torch has none
    return loss
