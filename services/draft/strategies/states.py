"""The states that a draft with a feature head reads, and the rows that its model is fed with them.

The row of a confirmed token reads the target's state of the token before, if it came. The row of a draft
token reads the draft's own state of the token before, if its logits were computed. Other rows read nothing,
so a draft never waits (galley/distill/features/draft.py says what it was trained with).

A state that comes after its row was fed is worth feeding that row again, and those behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from galley.core.content import common_prefix_len
from galley.core.features import NO_STATES, States
from galley.core.trees import ROOT
from galley.engine.load.feature_head import FeatureHead
from galley.engine.model import CausalModel, Rows, SessionCache
from services.draft.strategies.base import DraftSession

Path: TypeAlias = tuple[int, ...]
"""The draft tokens of a session up to and including one; empty for its last confirmed token."""

# Own states of a session; more than a proposal and the tokens ahead of it have.
_MOST_OWN = 512


@dataclass(slots=True)
class _Memory:
    """The states of a session that may still be read.

    `held` are the target's. The cached tokens before `read` need no other state; the
    last of them has read the target's. `own` are the draft's states after the `confirmed` tokens.
    """

    held: States = NO_STATES
    read: int = 0
    confirmed: list[int] = field(default_factory=list)
    own: dict[Path, Tensor] = field(default_factory=dict)

    def follow(self, session: DraftSession) -> None:
        """Keep the states of tokens that the session may still have."""
        known, tokens = len(self.confirmed), session.tokens
        new = tuple(tokens[known : session.confirmed])
        same = common_prefix_len(self.confirmed, tokens[: session.confirmed])
        if same < known:
            self.held = self.held.until(min(same, session.confirmed - 1))
        if same < known or len(self.own) > _MOST_OWN:
            self.own = {}
        ahead = tuple(tokens[session.confirmed :])
        kept = {path[len(new) :]: state for path, state in self.own.items() if path[: len(new)] == new}
        self.own = {
            path: state
            for path, state in kept.items()
            if path[: len(ahead)] == ahead[: len(path)]  # one of the two begins with the other
        }
        self.confirmed = tokens[: session.confirmed]

    def drop_read(self, session: DraftSession) -> None:
        """Drop the target's states that no row will read: the last confirmed token may be fed again."""
        self.held = self.held.since(min(self.read, session.confirmed - 1) - 1)


class StateReader:
    """Feed the rows of a model with the states that they read."""

    def __init__(self, model: CausalModel, head: FeatureHead) -> None:
        self._model = model
        self._head = head
        self._device = model.kv.keys.device
        self._memories: WeakKeyDictionary[DraftSession, _Memory] = WeakKeyDictionary()

    def take(self, session: DraftSession, cache: SessionCache) -> bool:
        """Take the states that came for the session; cut its cache back to the first row that lacks one.

        Return True if there is such a row.
        """
        memory = self._memories.setdefault(session, _Memory())
        memory.follow(session)
        memory.held = memory.held.joined(self._usable(session.states))
        session.states = NO_STATES
        cached = common_prefix_len(cache.tokens, session.tokens)
        memory.read = min(memory.read, cached)
        first = max(memory.held.position + 1, memory.read)
        changed = bool(memory.held.tokens) and first < min(memory.held.end + 1, cached, session.confirmed)
        if changed:
            cache.truncate(first)
        memory.drop_read(session)
        return changed

    def has_read(self, session: DraftSession) -> bool:
        """Return True if the last confirmed token's row in the cache has read the target's state."""
        return self._memories[session].read >= session.confirmed

    @torch.inference_mode()
    def forward(self, batch: Sequence[tuple[DraftSession, Rows]]) -> Tensor:
        """Feed the rows with what they read, as `CausalModel.forward_head` does; keep their own states."""
        paths = [_paths_of(rows, session.confirmed) for session, rows in batch]
        layers = (self._model.info.layers,)
        logits, states = self._model.forward_states(self._with_states(batch, paths), layers)
        computed = iter(states[:, 0])
        for (session, rows), of_rows in zip(batch, paths, strict=True):
            own = self._memories[session].own
            for path in of_rows[len(of_rows) - rows.want_logits :]:
                state = next(computed)
                if path is not None:
                    own[path] = state.clone()  # a part of `states` would keep it all
        return logits

    def _with_states(
        self, batch: Sequence[tuple[DraftSession, Rows]], paths: Sequence[Sequence[Path | None]]
    ) -> list[Rows]:
        """Return the rows of the batch with what is added to their embeddings."""
        from_target: list[tuple[int, Tensor]] = []
        from_own: list[tuple[int, Tensor]] = []
        edges = [0]
        for (session, rows), of_rows in zip(batch, paths, strict=True):
            first, own = edges[-1], self._memories[session].own
            from_target += [(first + row, state) for row, state in self._target_states(session, rows)]
            from_own += [
                (first + row, own[path[:-1]]) for row, path in enumerate(of_rows) if path and path[:-1] in own
            ]
            edges.append(first + len(of_rows))
        if not from_target and not from_own:
            return [rows for _, rows in batch]
        added = self._added(edges[-1], from_target, from_own)
        parts = [added[first:last] for first, last in pairwise(edges)]
        return [replace(rows, added=part) for (_, rows), part in zip(batch, parts, strict=True)]

    def _added(
        self, rows: int, from_target: Sequence[tuple[int, Tensor]], from_own: Sequence[tuple[int, Tensor]]
    ) -> Tensor:
        """Return what is added to so many rows, some of which read a state, [rows, size]."""
        if len(from_own) == rows:  # as in most steps
            return self._head.from_own(torch.stack([state for _, state in from_own]))
        added = torch.zeros(rows, self._head.size, device=self._device)
        for read, project in ((from_target, self._head.from_target), (from_own, self._head.from_own)):
            if read:
                at = torch.tensor([row for row, _ in read], device=self._device)
                added[at] = project(torch.stack([state for _, state in read]).to(self._device))
        return added

    def _target_states(self, session: DraftSession, rows: Rows) -> Iterator[tuple[int, Tensor]]:
        """Yield the rows of confirmed tokens that read the target's state, with it, [layers, size]."""
        memory, begin = self._memories[session], len(rows.cache.tokens)
        memory.read = min(memory.read, begin)
        held = memory.held
        first = max(begin, held.position + 1)
        last = min(begin + len(rows.tokens), held.end + 1, session.confirmed)
        if first < last:
            memory.read = last
            memory.drop_read(session)
            states = self._decoded(held)[first - 1 - held.position : last - 1 - held.position]
            yield from enumerate(states, first - begin)

    def _usable(self, states: States) -> States:
        """Return the states after the last one that is not finite."""
        if not states.tokens:
            return states
        finite = self._decoded(states).isfinite().flatten(1).all(1)
        if bool(finite.all()):
            return states
        return states.since(states.position + 1 + int((~finite).nonzero()[-1]))

    def _decoded(self, states: States) -> Tensor:
        """Return bfloat16 [tokens, layers, size]."""
        numbers = torch.frombuffer(bytearray(states.data), dtype=torch.bfloat16)
        return numbers.view(states.tokens, len(self._head.layers), self._head.size)


def _paths_of(rows: Rows, confirmed: int) -> list[Path | None]:
    """Return the path of each row's token; None before the last confirmed token."""
    cache = rows.cache
    known = len(cache.tokens)
    plain = rows.tokens[: max(0, cache.slots + len(rows.tokens) - len(rows.parents) - known)]
    beyond = [*cache.tokens[confirmed:], *plain[max(0, confirmed - known) :]]
    ends = range(known + 1 - confirmed, known + 1 - confirmed + len(plain))
    paths: list[Path | None] = [tuple(beyond[:end]) if end >= 0 else None for end in ends]
    nodes: list[Path] = []
    for token, parent in zip([*cache.tree, *rows.tokens[len(plain) :]], rows.parents, strict=True):
        above = tuple(beyond) if parent == ROOT else nodes[parent]
        nodes.append((*above, token))
    return paths + nodes[len(cache.tree) :]
