"""Faults of the product put in on purpose: the simulator has to find each of them.

Nothing of this is in the product: a mutant replaces a class where the shell takes it from.
"""

from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from unittest import mock

from services.core.content import Hit, Miss
from services.core.drafting import Drafting
from services.core.errors import LogLost, UnknownSession
from services.core.kv_table import KvTable
from services.core.session import Session
from services.core.store import UNCHANGED, Directory, SessionEnded
from services.gateway.drafts import Draft
from tests.simulation.redis import Sessions
from tests.simulation.replicas import SimEngine
from tests.simulation.truth import true_token
from tests.simulation.world import Kinds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from services.core.content import SessionKey
    from services.core.store import Ownership


class StreamsBeforeCommit(Session):
    """What is confirmed leaves at once; the log follows."""

    def _commit(self) -> None:
        super()._commit()
        self._emit()

    def _emit(self) -> bool:
        logged, self._logged = self._logged, len(self.answer.tokens)
        try:
            return super()._emit()
        finally:
            self._logged = logged


class NoFencing(Sessions):
    """Whoever has ever owned a session may go on with it."""

    def _owned(self, owner: Ownership) -> object:  # type: ignore[override]  # as the record is private
        record = self._find(owner.session_id)
        if record is None:
            raise UnknownSession(owner.session_id)
        if record.state == "finished":
            raise SessionEnded(owner.session_id)
        return record


class AppendsTwice(Sessions):
    """A commit that is repeated is appended again."""

    async def commit(
        self,
        owner: Ownership,
        expected_len: int,
        tokens: Sequence[int],
        meta: bytes,
        directory: Directory = UNCHANGED,
    ) -> int:
        length = len(self._owned(owner).tokens)
        return await super().commit(owner, max(expected_len, length), tokens, meta, directory)


class RefusesRepeats(Sessions):
    """A commit that is repeated is taken for one of another log."""

    async def commit(
        self,
        owner: Ownership,
        expected_len: int,
        tokens: Sequence[int],
        meta: bytes,
        directory: Directory = UNCHANGED,
    ) -> int:
        if len(self._owned(owner).tokens) > expected_len:
            raise LogLost(owner.session_id)
        return await super().commit(owner, expected_len, tokens, meta, directory)


class NoiseByRound(SimEngine):
    """The noise of a token is that of the pass which draws it."""

    def token(self, seed: int, position: int, history: Sequence[int]) -> int:
        return true_token(self.info.fingerprint, seed, self.passes, history)


class TrustsLength(KvTable):
    """As many tokens as the prefix has are the prefix."""

    def look_up(self, key: SessionKey, start: int, tokens: Sequence[int], prefix_hash: bytes) -> Hit | Miss:
        ours = self.tokens_of(key)
        return Hit(start) if len(ours) >= start else super().look_up(key, start, tokens, prefix_hash)


class NeverAgain(Drafting):
    """A draft that has failed once is not asked again."""

    def _rest(self, now: int) -> None:
        super()._rest(now)
        self._off_until = math.inf  # type: ignore[assignment]  # beyond all time


def _met_once(draft: Draft) -> bool:
    return not draft.fits


@dataclass(frozen=True, slots=True)
class Mutant:
    """`patches` replaces by name; `mixed` looks for it where targets are of two builds."""

    name: str
    kinds: Kinds = Kinds()
    patches: Mapping[str, object] = field(default_factory=dict)
    mixed: bool = False

    @contextmanager
    def put_in(self) -> Iterator[None]:
        """Within, the product has this fault."""
        with ExitStack() as stack:
            for name, replacement in self.patches.items():
                stack.enter_context(mock.patch(name, replacement))
            yield


MUTANTS = (
    Mutant("streams before the commit", patches={"services.gateway.streams.Session": StreamsBeforeCommit}),
    Mutant("does not fence", Kinds(sessions=NoFencing)),
    Mutant("appends a repeated commit", Kinds(sessions=AppendsTwice)),
    Mutant("refuses a repeated commit", Kinds(sessions=RefusesRepeats)),
    Mutant("draws noise by round", Kinds(engine=NoiseByRound)),
    Mutant("trusts a cache by length", patches={"services.target.servicer.KvTable": TrustsLength}, mixed=True),
    Mutant("never closes a session's breaker", patches={"services.core.session.Drafting": NeverAgain}),
    Mutant("never meets a draft again", patches={"services.gateway.drafts.Draft.must_meet": _met_once}),
)
