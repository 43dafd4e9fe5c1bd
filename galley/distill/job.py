"""The inputs of a distillation, read and checked before any work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from galley.distill.data.corpus import Corpus
from galley.distill.data.material import gather
from galley.distill.export import begin_from, read_draft
from galley.distill.options import Options
from galley.distill.training.evaluation import Reports
from galley.distill.training.models import Llama, Target, read_target
from galley.distill.training.training import Schedule, head_tokens
from galley.distill.work import claim, origin_of


@dataclass(frozen=True, slots=True)
class Job:
    """The material of a run; `present`: the draft to compare with, and the tokens of its head."""

    options: Options
    reports: Reports
    target: Target
    train: Corpus
    held_out: Corpus
    heads: NDArray[np.int64]
    origin: dict[str, Any]
    start: Llama | None
    present: tuple[Llama, NDArray[np.int64]] | None

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.options.dtype == "bfloat16" else torch.float32

    @property
    def identity(self) -> dict[str, Any]:
        """Return the origin and the number of training tokens. A checkpoint with other values is refused."""
        return self.origin | {"train_tokens": len(self.train.ids)}

    @property
    def schedule(self) -> Schedule:
        options = self.options
        return Schedule(options.tokens, options.batch, options.rate, seed=options.seed)

    def student(self) -> Llama:
        """Return the draft before training: the one to start from, or the target's first layers."""
        student = self.target.student(self.options.layers, torch.from_numpy(self.heads))
        if self.start is not None:
            begin_from(student, self.start)
        return student


def prepare(options: Options, reports: Reports) -> Job:
    """Claim the folder of the run and gather its corpora. Raise InvalidField naming what cannot be used."""
    options.check()
    torch.set_num_threads(options.threads)
    target = read_target(options.target)
    target.refuse_layers(options.layers)
    present = None if options.against is None else read_draft(options.against, target, "against")
    start = None if options.start is None else read_draft(options.start, target, "start")
    origin = origin_of(options, target)
    options.work.mkdir(parents=True, exist_ok=True)
    claim(options.work, origin)
    train, held_out = gather(options, reports)
    for corpus in (train, held_out):
        corpus.refuse_beyond(target.vocab)
    heads = head_tokens(train, target.vocab, min(options.head, target.vocab), target.end_tokens)
    if start is not None:
        heads = start[1]
    return Job(options, reports, target, train, held_out, heads, origin, start and start[0], present)
