"""The interface of vLLM's engine core as `VllmTarget` uses it: one step at a time.

A *sequence* is a request of vLLM: a session's tokens, and how the next ones are drawn. Its *record* is the
tokens that it was given and those that it has drawn since. All calls are made on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from galley.core.errors import GalleyError, Unavailable
from galley.core.step import Draw, Sampled
from services.target.engine.protocol import EngineInfo


class CoreLost(Unavailable):
    """The engine core has failed and cannot go on: the replica must end."""


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence to add. `draw.history` is `tokens`.

    Prefixes are shared by sequences of the same `salt` only. The higher `priority` counts as older, then the
    earlier `arrival_ns`. `lora` names an adapter; empty: none.
    """

    id: str
    tokens: Sequence[int]
    draw: Draw
    salt: str
    priority: int
    arrival_ns: int
    lora: str = ""


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """The result of a step for one sequence.

    An `outcome` of None: nothing was drawn, since the prompt goes on, or the sequence waits or was preempted.
    After an error the sequence can only be ended. `computed` is the number of tokens of the record that have
    KV: all but the last after a draw. `cached` is how many were found in the prefix cache; only the first
    step that the sequence takes part in reports it. The step fed `rows` tokens of the record, none to a
    sequence that did not take part, and verified `verified` draft tokens. With `is_cut` vLLM has drawn more
    than the outcome has, and the sequence can only be ended.
    """

    outcome: Sampled | GalleyError | None
    computed: int
    cached: int = 0
    rows: int = 0
    verified: int = 0
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """Consecutive full blocks that the prefix cache now holds.

    `parent` is the hash of the block before; None: they are the first ones of a sequence with this `salt`.
    """

    hashes: tuple[Hashable, ...]
    parent: Hashable | None
    tokens: Sequence[int]
    salt: str


@dataclass(frozen=True, slots=True)
class DroppedBlocks:
    """Blocks that the prefix cache no longer holds."""

    hashes: tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class CoreFacts:
    """Blocks that sequences hold, running or paused; and changes of the prefix cache since the last call.

    An event of None: the cache was cleared. There are no events where vLLM reports none.
    """

    used_blocks: int
    events: Sequence[StoredBlocks | DroppedBlocks | None] = ()


class SteppedCore(Protocol):
    """vLLM's engine core, one step at a time."""

    @property
    def info(self) -> EngineInfo:
        """Return facts that never change; `kv_blocks` are those that sequences can hold."""

    @property
    def max_draft_tokens(self) -> int:
        """Return the most draft tokens of a sequence in one step."""

    @property
    def max_sequences(self) -> int:
        """Return the most sequences that a step can hold."""

    def add(self, sequence: NewSequence) -> None: ...

    def end(self, ids: Iterable[str]) -> None:
        """Free the sequences; the prefix cache keeps their full blocks. Unknown ids are ignored."""

    def step(
        self, drafts: Mapping[str, tuple[int, ...]], constrained: Mapping[str, Draw] | None = None
    ) -> dict[str, SequenceStep]:
        """Run one step for the named sequences, with these draft tokens; return what it did for each of them.

        `constrained` are the draws of those that have a grammar, whose history is the sequence's record.
        All others are paused: they keep their blocks unless the named ones need them. Draft tokens count only
        for a sequence whose record has KV but for its last token; fewer than given may be verified. Raise
        CoreLost once the core has failed.
        """

    def facts(self) -> CoreFacts: ...
