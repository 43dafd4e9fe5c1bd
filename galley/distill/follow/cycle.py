"""Train the present draft further on the sessions of a cycle, and compare the two on others.

A session's label is its own next token. The present draft and the new one are fed the same held-out sessions,
so their difference is one of pairs: its interval is narrower than those of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from galley.core.errors import InvalidField
from galley.distill.data.corpus import Conversation, Corpus, corpus_of, read_corpus
from galley.distill.export import NORM, SHARPENING, as_stored, read_draft, sharpened, write_draft
from galley.distill.features.draft import FeatureDraft
from galley.distill.follow.comparison import MIXED, Comparison, compared
from galley.distill.follow.inputs import Chosen, Inputs
from galley.distill.follow.options import FollowOptions
from galley.distill.training.evaluation import agreement
from galley.distill.training.models import Llama, read_target
from galley.distill.training.training import (
    Progress,
    Schedule,
    Training,
    hard_labels,
    head_rows,
    label_loss,
)

_MIXED_SHARE = 0.2
_MOST_EPOCHS = 4
_WARM_UP_STEPS = 10
_DECAY_SHARE = 0.7
_HEAD_GROWTH = 1.5
"""Most tokens of a draft's head, as a multiple of those of the draft that it all began with."""
_FEWEST_USERS = 4
"""Sessions that must have a token before the head gets it: the weights show which tokens it has."""
_NO_WORKLOAD = "none"
_FEWEST_MIXED = 8
"""Conversations of the corpus that are held out, at least."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft and the tokens of its head."""

    model: Llama
    heads: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Trained:
    """A new draft, answer tokens seen and seconds of training, and how it compares with the present one."""

    draft: Draft
    seen: int
    train_s: float
    comparison: Comparison


class Learner:
    """The target's embeddings and the draft that it all began with, which the cycles of a process share."""

    def __init__(self, options: FollowOptions) -> None:
        """Read target and corpus. Raise InvalidField, naming the option, for one that cannot be used."""
        torch.set_num_threads(options.threads)
        self._options = options
        self.target = read_target(options.target, only_ends=True)
        self._most_head = round(len(self.read(options.start).heads) * _HEAD_GROWTH)
        mixed = [one for path in options.corpus for one in read_corpus(path)]
        self._mixed = corpus_of([one._replace(workload=MIXED) for one in mixed]) if mixed else None
        if self._mixed is not None:
            self._mixed.refuse_beyond(self.target.vocab)

    def read(self, folder: Path) -> Draft:
        """Return the draft in a directory. Raise InvalidField unless it can be trained further here."""
        model, heads = read_draft(folder, self.target, "start")
        if isinstance(model, FeatureDraft) or not self._has_embedding(model):
            raise InvalidField("start", f"{folder}: must read tokens only, and use the target's embeddings")
        return Draft(model, heads)

    def _has_embedding(self, model: Llama) -> bool:
        """Return True if the draft uses the target's embeddings, not its own."""
        return model.embedding.data_ptr() == self.target.embedding.data_ptr()

    def write(self, draft: Draft, folder: Path) -> None:
        write_draft(folder, draft.model, self.target, draft.heads, self._options.target)

    def train(self, present: Draft, inputs: Inputs, seed: int, report: Callable[[Progress], None]) -> Trained:
        """Return the present draft trained further. Blocks; `report` may raise to end it."""
        options = self._options
        train, held_out = self._corpora(inputs, seed)
        student = self._student(present, inputs.train)
        heads = _extended(present.heads, inputs.train, self._most_head)
        labels = hard_labels(train, head_rows(heads, self.target.vocab))
        tokens = min(options.cycle_tokens, _MOST_EPOCHS * int(train.answer_len.sum()))
        schedule = Schedule(
            tokens,
            options.batch,
            options.rate,
            warm_up_steps=_WARM_UP_STEPS,
            decay_share=_DECAY_SHARE,
            seed=seed,
        )
        training = Training(student, schedule)
        dtype = torch.bfloat16 if options.dtype == "bfloat16" else torch.float32
        training.run(train, label_loss(student, labels, 0.0, dtype), report)
        new = Draft(sharpened(student), heads)
        before = agreement(held_out, present.model, present.heads, dtype)
        after = agreement(held_out, as_stored(new.model), new.heads, dtype)
        names = [one.principal for one in inputs.held_out]
        names += [MIXED] * (len(held_out) - len(names))
        comparison = compared(held_out, names, before, after)
        return Trained(new, training.progress.seen, training.progress.train_s, comparison)

    def _student(self, present: Draft, train: Sequence[Chosen]) -> Llama:
        """Return the present draft with logits as it was trained, and rows for the new tokens of its head.

        Their rows are the target's, as all rows were at first.
        """
        heads = _extended(present.heads, train, self._most_head)
        student = Llama(present.model.shape, present.model.embedding, len(heads))
        state = present.model.state_dict()
        rows = self.target.head[torch.from_numpy(heads)].float()
        rows[torch.from_numpy(np.searchsorted(heads, present.heads))] = state["lm_head.weight"]
        student.load_state_dict(state | {NORM: state[NORM] / SHARPENING, "lm_head.weight": rows})
        return student

    def _corpora(self, inputs: Inputs, seed: int) -> tuple[Corpus, Corpus]:
        train, held_out = _conversations(inputs.train), _conversations(inputs.held_out)
        if self._mixed is not None:
            count = sum(len(one.tokens) for one in train) * _MIXED_SHARE / (1 - _MIXED_SHARE)
            order = np.random.default_rng(seed).permutation(len(self._mixed)).tolist()
            kept = max(_FEWEST_MIXED, len(held_out) // 2)
            held_out += [self._mixed[place] for place in order[:kept]]
            for place in order[kept:]:
                if count <= 0:
                    break
                train.append(self._mixed[place])
                count -= len(train[-1].tokens)
        return corpus_of(train), corpus_of(held_out)


def _conversations(chosen: Sequence[Chosen]) -> list[Conversation]:
    return [
        Conversation(
            one.session.tokens,
            one.session.prompt_len,
            one.session.workload or _NO_WORKLOAD,
            one.session.temperature,
        )
        for one in chosen
    ]


def _extended(heads: NDArray[np.int64], train: Sequence[Chosen], most: int) -> NDArray[np.int64]:
    """Return the head's tokens with further ones that several sessions have, the most frequent first."""
    users: dict[int, int] = {}
    for chosen in train:
        for token in set(chosen.session.tokens[chosen.session.prompt_len :]):
            users[token] = users.get(token, 0) + 1
    missing = set(users) - set(heads.tolist())
    frequent = sorted((t for t in missing if users[t] >= _FEWEST_USERS), key=lambda t: (-users[t], t))
    return np.sort(np.concatenate([heads, np.array(frequent[: max(0, most - len(heads))], np.int64)]))
