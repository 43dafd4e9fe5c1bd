"""The residual stream of a step: what is added to its embeddings, and the states that leave it.

The state of a row after L layers is its residual stream there, before any norm; that after all layers is the
input of the final norm. A draft with a feature head reads its target's states (galley/core/features.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from galley.core.errors import Broken
from galley.core.step import Sampled, StepChunk, StepOutcome
from galley.core.trees import follow


@dataclass(slots=True)
class Residuals:
    """States to read from the residual stream of a forward pass, and what to add to it at the start.

    The states of `rows` are read after each of `layers`; both rise, and None means all rows, padding too.
    `added` is float32 [rows of the step, hidden].
    """

    layers: tuple[int, ...] = ()
    rows: Sequence[int] | None = ()
    added: Tensor | None = None
    _states: list[Tensor] = field(default_factory=list)
    _index: Tensor | None = None

    def read(self, after: int, residual: Tensor) -> None:
        """Copy the rows of `residual` [rows, hidden], which has passed `after` layers, if they are wanted."""
        if after not in self.layers:
            return
        if self.rows is None:
            self._states.append(residual.clone())
            return
        if self._index is None:
            self._index = torch.tensor(self.rows, dtype=torch.long, device=residual.device)
        self._states.append(residual.index_select(0, self._index))

    def states(self) -> Tensor:
        """Return what was read, [rows, layers, hidden]."""
        return torch.stack(self._states, 1)

    def take(self, states: Tensor) -> None:
        """Take the states of a step's first rows, [rows, layers, hidden], as if they had been read here."""
        rows = torch.tensor(self.rows, dtype=torch.long, device=states.device)
        self._states = list(states.index_select(0, rows).unbind(1))

    def part(self, begin: int, end: int) -> Residuals:
        """Return those of the rows [begin, end) as a step of their own."""
        rows = [row - begin for row in self.rows or () if begin <= row < end]
        return Residuals(self.layers, rows, None if self.added is None else self.added[begin:end])

    def join(self, parts: Sequence[Residuals]) -> None:
        """Take the states that all parts of this step have read."""
        read = zip(*(part._states for part in parts), strict=True)  # noqa: SLF001  # its own class
        self._states = [torch.cat(states) for states in read]


# Of a step without states and additions: nothing is ever read into it.
UNTOUCHED = Residuals()


def wanted_rows(chunk: StepChunk) -> int:
    """Return of how many of the last rows states are wanted."""
    return chunk.feature_rows if chunk.feature_layers else 0


def wanted_layers(chunks: Sequence[StepChunk]) -> tuple[int, ...]:
    """Return the layers after which any of the chunks wants states, rising."""
    return tuple(sorted({layer for chunk in chunks for layer in chunk.feature_layers}))


def check_states(chunks: Sequence[StepChunk], layers: int) -> None:
    """Raise Broken for states that a model of so many layers does not have, or of rows that are not fed."""
    for chunk in chunks:
        if not chunk.feature_layers:
            continue
        if not 1 <= min(chunk.feature_layers) <= max(chunk.feature_layers) <= layers:
            got = ", ".join(map(str, chunk.feature_layers))
            raise Broken(f"feature_layers: must be in [1, {layers}], got {got}")
        least, most = chunk.want_logits, len(chunk.tokens)
        if not least <= chunk.feature_rows <= most:
            raise Broken(f"feature_rows: must be in [{least}, {most}], got {chunk.feature_rows}")


def with_states(
    chunks: Sequence[StepChunk], outcomes: Sequence[StepOutcome], states: Tensor
) -> list[StepOutcome]:
    """Return the outcomes with the wanted states of the tokens that are confirmed with them.

    `states` are those of a step, [sum of feature_rows, wanted_layers, hidden]; those returned leave the
    model's device in one copy.
    """
    if len(states) == 0:
        return list(outcomes)
    first, rows, counts = 0, [], []
    for chunk, outcome in zip(chunks, outcomes, strict=True):
        own = _confirmed_rows(chunk, outcome)
        rows += [first + row for row in own]
        counts.append(len(own))
        first += wanted_rows(chunk)
    index = torch.tensor(rows, dtype=torch.long, device=states.device)
    # numpy has no bfloat16, and is quicker with small arrays.
    found = states.index_select(0, index).to(torch.bfloat16).cpu().view(torch.int16).numpy()
    layers, ends = wanted_layers(chunks), accumulate(counts)
    return [
        replace(outcome, states=_packed(found[end - count : end], layers, chunk.feature_layers))
        if count and isinstance(outcome, Sampled)
        else outcome
        for chunk, outcome, count, end in zip(chunks, outcomes, counts, ends, strict=True)
    ]


def _confirmed_rows(chunk: StepChunk, outcome: StepOutcome) -> list[int]:
    """Return which of the rows that a chunk wants states of are confirmed tokens, in order."""
    draw = chunk.draw
    if draw is None or not chunk.feature_layers or not isinstance(outcome, Sampled):
        return []
    nodes = chunk.feature_rows - len(draw.draft_tokens)  # the row of the first draft token
    path = follow(draw.draft_tokens, draw.parents, outcome.tokens[:-1])
    return [*range(nodes), *(nodes + node for node in path)]


def _packed(states: NDArray[np.int16], layers: tuple[int, ...], order: tuple[int, ...]) -> bytes:
    """Return the states [rows, layers, hidden] of the layers of `order`, in that order."""
    if order != layers:
        states = states[:, [layers.index(layer) for layer in order]]
    return states.tobytes()


def size_of(module: Any) -> tuple[int, int]:
    """Return how many layers a transformers model has, and the size of its states; 0 and 0 if it has none."""
    layers, size = _layers_of(module), getattr(module.config, "hidden_size", None)
    return (0, 0) if layers is None or size is None else (len(layers), size)


def add_to_embeddings(module: Any, tokens: Tensor, added: Tensor) -> Tensor:
    """Return the embeddings of `tokens` [1, rows] with `added` [up to rows, hidden], [1, rows, hidden]."""
    embedded: Tensor = module.get_input_embeddings()(tokens)
    total = embedded.float()
    total[0, : len(added)] += added
    return total.to(embedded.dtype)


@contextmanager
def hooked(module: Any, residuals: Residuals) -> Iterator[None]:
    """Read the residual stream while transformers' code runs the layers of `module`."""
    layers = _layers_of(module) if residuals.layers else None
    hooks = [
        layer.register_forward_hook(_reader(index + 1, residuals))
        for index, layer in enumerate(layers or ())
        if index + 1 in residuals.layers
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _reader(after: int, residuals: Residuals) -> Callable[[nn.Module, Any, Any], None]:
    def read(_layer: nn.Module, _inputs: Any, outputs: Any) -> None:
        hidden = outputs[0] if isinstance(outputs, tuple) else outputs
        residuals.read(after, hidden[0])

    return read


def _layers_of(module: Any) -> nn.ModuleList | None:
    count = module.config.num_hidden_layers
    lists = (child for child in module.base_model.children() if isinstance(child, nn.ModuleList))
    return next((layers for layers in lists if len(layers) == count), None)
