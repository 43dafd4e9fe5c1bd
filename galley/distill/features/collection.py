"""Collect what a feature draft is trained on: the target's states at each token, and labels of answers.

The target runs once over some conversations of a corpus. Its output goes into shards, which are written
whole; a run that continues skips those that exist. States are read one conversation at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from galley.core.errors import InvalidField
from galley.distill.data.corpus import Batch, Corpus, batch_of, grouped
from galley.distill.features.draft import TargetStates
from galley.distill.features.loss import TEMPERATURES, TargetLabels
from galley.distill.training.models import Llama
from galley.distill.training.training import LABELS
from galley.distill.work import replacing

_BUDGET, _SHARD_GROUPS, _LOGIT_ROWS = 2048, 8, 512
_FEWEST_LAYERS = 3
_LABELS = ("places", "ids", "logits", "log_z")


@dataclass(frozen=True, slots=True)
class Collection:
    """The tokens of the draft's head, after which layers states are taken, and where shards are.

    `with_outputs` keeps the target's normalized states of answers too, from which all its logits follow.
    """

    shards: Path
    heads: NDArray[np.int64]
    after: tuple[int, ...]
    with_outputs: bool = False

    def collect(self, corpus: Corpus, target: Llama, report: Callable[[int], None]) -> None:
        """Run the target over a corpus; `report` gets the conversations done so far."""
        self.shards.mkdir(parents=True, exist_ok=True)
        columns = torch.from_numpy(self.heads)
        done = 0
        for path, groups in self._paths(corpus):
            if not path.exists():
                tensors = _joined([_run(corpus, group, target, self.after, columns) for group in groups])
                if not self.with_outputs:
                    del tensors["outputs"]
                with replacing(path) as unfinished:
                    save_file(tensors, unfinished)
            done += sum(map(len, groups))
            report(done)

    def read(self, corpus: Corpus) -> Collected:
        """Open the shards. Raise InvalidField if one is missing or damaged."""
        return Collected(corpus, [path for path, _ in self._paths(corpus)], self.after)

    def _paths(self, corpus: Corpus) -> Iterator[tuple[Path, list[NDArray[np.int64]]]]:
        groups = grouped(corpus.lengths, np.arange(len(corpus)), _BUDGET)
        for number, first in enumerate(range(0, len(groups), _SHARD_GROUPS)):
            path = self.shards / f"features-{number:05d}.safetensors"
            yield path, groups[first : first + _SHARD_GROUPS]


def layers_of(count: int) -> tuple[int, ...]:
    """Return after which of `count` layers states are taken: a low, a middle and the last one."""
    if count < _FEWEST_LAYERS:
        return tuple(range(1, count + 1))
    return (max(1, count // 10), count // 2, count)


def chosen(corpus: Corpus, most: int, seed: int) -> Corpus:
    """Return conversations chosen at random, at least one, of together at most `most` tokens."""
    order = np.random.default_rng(seed).permutation(len(corpus))
    count = int(np.searchsorted(np.cumsum(corpus.lengths[order]), most, "right"))
    return corpus.part(order[: max(1, count)])


@torch.inference_mode()
def _run(
    corpus: Corpus, group: NDArray[np.int64], target: Llama, after: Sequence[int], columns: Tensor
) -> dict[str, Tensor]:
    """Return tensors of a group's conversations, those of one after those of the other."""
    batch = batch_of(corpus, group)
    dtype = target.lm_head.weight.dtype
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        passed, final = target.layer_states(batch.tokens, after)
    outputs = final.flatten(0, 1)[batch.rows].to(dtype)
    lengths = corpus.lengths[group] - 1
    states = {
        _states_of(layer): torch.cat([of_it[row, :length] for row, length in enumerate(lengths.tolist())])
        for layer, of_it in zip(after, passed, strict=True)
    }
    return {
        "conversations": torch.from_numpy(group),
        "places": torch.from_numpy(batch.places),
        "outputs": outputs,
        **_labels(outputs, target.lm_head.weight, columns),
        **{name: of_it.to(torch.bfloat16) for name, of_it in states.items()},
    }


def _labels(outputs: Tensor, head: Tensor, columns: Tensor) -> dict[str, Tensor]:
    parts = []
    for first in range(0, len(outputs), _LOGIT_ROWS):
        logits = (outputs[first : first + _LOGIT_ROWS] @ head.T).float()  # [rows, vocab]
        logits -= logits.max(1, keepdim=True).values
        likely = logits[:, columns].topk(min(LABELS, len(columns)))
        log_z = torch.stack([(logits / temperature).logsumexp(1) for temperature in TEMPERATURES], 1)
        parts.append((likely.indices.to(torch.int32), likely.values, log_z))
    ids, values, log_z = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return {"ids": ids, "logits": values, "log_z": log_z}


def _joined(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _states_of(layer: int) -> str:
    return f"states.{layer}"


class Collected:
    """Labels and states of a corpus. Labels are in memory, states in the files."""

    def __init__(self, corpus: Corpus, paths: Sequence[Path], after: Sequence[int]) -> None:
        self.corpus, self.after = corpus, tuple(after)
        self._files, self._shards = ExitStack(), list[Any]()
        self._at: dict[int, tuple[Any, int]] = {}  # of a conversation: its shard, and its first row there
        parts = [self._opened(path) for path in paths]
        labels = _joined(parts)
        self._order = labels["places"].argsort()
        self._ids, self._logits, self._log_z = (labels[name][self._order] for name in _LABELS[1:])

    def _opened(self, path: Path) -> dict[str, Tensor]:
        try:
            file = self._files.enter_context(safe_open(path, framework="pt"))
            row = 0
            for index in file.get_tensor("conversations").tolist():
                self._at[index] = (file, row)
                row += int(self.corpus.lengths[index]) - 1
            self._shards.append(file)
            return {name: file.get_tensor(name) for name in _LABELS}
        except (OSError, SafetensorError, IndexError) as error:
            raise InvalidField("work", f"{path}: cannot be read: {error}; remove it and continue") from error

    def outputs(self) -> Tensor:
        """Return the target's normalized states at all answers' places: [answer tokens, hidden]."""
        return torch.cat([file.get_tensor("outputs") for file in self._shards])[self._order]

    def states(self, batch: Batch) -> Tensor:
        """Return states [batch, length, layers, hidden], 0 at the padding."""
        found = [self._states(index) for index in batch.conversations.tolist()]
        whole = found[0].new_zeros(*batch.tokens.shape, *found[0].shape[1:])
        for row, states in enumerate(found):
            whole[row, : len(states)] = states
        return whole

    def _states(self, conversation: int) -> Tensor:
        file, first = self._at[conversation]
        last = first + int(self.corpus.lengths[conversation]) - 1
        return torch.stack([file.get_slice(_states_of(layer))[first:last] for layer in self.after], 1)

    def given(self, batch: Batch) -> TargetStates:
        """Return the states of a batch, all known to the draft."""
        return TargetStates(self.states(batch), torch.ones(batch.tokens.shape, dtype=torch.bool))

    def labels(self, places: NDArray[np.int64]) -> TargetLabels:
        at = torch.from_numpy(places)
        return TargetLabels(self._ids[at].long(), self._logits[at], self._log_z[at])

    def sample(self) -> Tensor:
        """Return the states of the first conversation: [tokens, layers, hidden]."""
        return self._states(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()
