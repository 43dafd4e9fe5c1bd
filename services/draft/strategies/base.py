"""Define the interface of draft strategies: from a session's tokens to a proposal, a step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from galley.core.content import PrefixHasher, common_prefix_len
from galley.core.errors import GalleyError
from galley.core.features import NO_STATES, States
from galley.core.grammar.compiled import CompiledGrammar
from galley.core.scheduler.messages import Slice


class DraftSession:
    """Tokens of one session, from position 0: `confirmed` ones, then draft tokens, which may be replaced.

    `prefix` hashes the tokens. `room` is how many it may hold. `states` are the target's that came and that
    no strategy has taken yet. Sessions compare by identity, so a strategy can keep its state in a
    WeakKeyDictionary that forgets it with the session.
    """

    __slots__ = ("__weakref__", "confirmed", "prefix", "room", "states", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.prefix = PrefixHasher()
        self.confirmed = 0
        self.room = 0
        self.states: States = NO_STATES

    def follow(self, sent: Slice, ahead: int) -> None:
        """Take the tokens of a slice, whose last `ahead` are draft tokens.

        Drop the states of tokens that it replaces, and of the last confirmed one: a store that lost its
        latest writes may let a session begin again from fewer tokens.
        """
        same = sent.start + common_prefix_len(self.tokens[sent.start :], sent.tokens)
        self.prefix.truncate(same)
        self.tokens[sent.start :] = sent.tokens
        self.confirmed = sent.position - ahead
        self.states = self.states.until(min(same, self.confirmed - 1))


@dataclass(frozen=True, slots=True)
class DraftJob:
    """A request for at most `k` draft tokens after `session.tokens`, which end where `slice` ends.

    Only tokens that its `grammar` allows can be accepted. `width` is the most tokens for one position; above
    1 a strategy may propose a tree (`galley/core/trees.py`), whose nodes `k` counts.
    """

    slice: Slice
    session: DraftSession
    k: int
    workload: str = ""
    grammar: CompiledGrammar | None = None
    width: int = 1


@dataclass(slots=True)
class Proposal:
    """An unfinished proposal of at most `job.k` tokens, usable at any time.

    `survival[i]` estimates the probability that token i and all before it on its path are accepted; it never
    rises. `sources[i]` names what drafted token i; empty, the strategy did. `parents` are those of a tree,
    empty for a chain. `used_features`: the target's state of the token before the last confirmed one was
    read. An error concerns this job only.
    """

    job: DraftJob
    tokens: list[int] = field(default_factory=list)
    survival: list[float] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    used_features: bool = False
    done: bool = False
    error: GalleyError | None = None


class Strategy(Protocol):
    """A way to draft; called from one thread, one step at a time."""

    def begin(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        """Return a proposal for each job, in order, `done` if it needs no step; sessions differ."""

    def advance(self, proposals: Sequence[Proposal]) -> None:
        """Advance each of these unfinished proposals by one step, usually a token, computed together.

        Proposals join and leave between calls; a cancelled one is not advanced again.
        """


class NoneStrategy:
    """Propose no tokens, so that the target decodes plainly; the draft is called as with any strategy."""

    def begin(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        return [Proposal(job, done=True) for job in jobs]

    def advance(self, proposals: Sequence[Proposal]) -> None: ...
