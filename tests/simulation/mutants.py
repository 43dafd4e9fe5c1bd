"""Faults put into the product on purpose, each of which the simulator has to find.

A mutant replaces a class where the gateway imports it; the product itself contains none of this.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from galley.core.errors import LogLost, UnknownSession
from galley.core.kv.session import KvSession
from galley.core.routing.breaker import Breaker
from galley.core.session.drafting import Drafting
from galley.core.store import (
    UNCHANGED,
    Exchange,
    Exchanged,
    KvDirectory,
    LogHashes,
    NewSession,
    Ownership,
    SessionEnded,
    StoredSession,
    TokenBucket,
)
from services.gateway.replicas.drafts import DraftReplica
from services.gateway.session.streams import Streams
from services.gateway.store.session_log import SessionLog, StoreTime, retry
from tests.fakes.owners import hashes_of
from tests.fakes.session_world import StreamsBeforeCommit
from tests.simulation.system.redis import Sessions, SimStore, at_once
from tests.simulation.system.replicas import SimEngine
from tests.simulation.truth import true_token
from tests.simulation.world import Kinds

_NEVER_MS = 10**15
_REFUSED = "the commit is refused, as it is there already"


class NoFencing(Sessions):
    """Let earlier owners of a session go on changing it."""

    def _owned(self, owner: Ownership) -> object:  # type: ignore[override]  # as the record is private
        record = self._find(owner.session_id)
        if record is None:
            raise UnknownSession(owner.session_id)
        if record.state == "finished":
            raise SessionEnded(owner.session_id)
        return record


class Unconditional(Sessions):
    """Give a session to any call that comes, as before decision 028."""

    async def create(self, new: NewSession, nonce: bytes, latest_ms: int) -> StoredSession:
        stored = await super().create(new, nonce, self._now_ms())
        if stored.ownership.nonce == nonce:
            return stored
        return await self.claim(stored.ownership, new.principal, nonce, latest_ms)

    async def claim(self, former: Ownership, principal: str, nonce: bytes, latest_ms: int) -> StoredSession:
        held = await self.read(former.session_id, principal)
        return await super().claim(held.ownership, principal, nonce, self._now_ms())


async def _changed_any_time(
    streams: Streams, operation: str, _session_id: str, change: Callable[..., Awaitable[Any]], until_ns: int
) -> Any:
    """Change the store whenever the call reaches it."""
    return await retry(operation, lambda: change(StoreTime(_NEVER_MS, 0, 0)), until_ns, streams._clock)


async def _read_at_once(store: SimStore, session_id: str, principal: str) -> StoredSession:
    """Need no call for what is not read: the claim comes first."""
    return at_once(store._sessions.read(session_id, principal))


class AppendsTwice(Sessions):
    """Append the tokens of a repeated commit again."""

    async def commit(
        self,
        owner: Ownership,
        expected_len: int,
        tokens: Sequence[int],
        meta: bytes,
        hashes: LogHashes,
        directory: KvDirectory = UNCHANGED,
    ) -> int:
        log = self._owned(owner).tokens
        if len(log) > expected_len:
            expected_len, hashes = len(log), hashes_of(log, tokens)
        return await super().commit(owner, expected_len, tokens, meta, hashes, directory)


class RefusesRepeats(Sessions):
    """Refuse a repeated commit as if the log were another."""

    async def commit(self, owner: Ownership, expected_len: int, *rest: Any, **named: Any) -> int:
        if len(self._owned(owner).tokens) > expected_len:
            raise LogLost(_REFUSED)
        return await super().commit(owner, expected_len, *rest, **named)


class NoiseByRound(SimEngine):
    """Make the noise of a token depend on the step that samples it."""

    def token(self, seed: int, position: int, history: Sequence[int]) -> int:
        return true_token(self.info.fingerprint, seed, self.passes, history)


def _trusting_length(session: KvSession, tokens: Sequence[int]) -> None:
    session.truncate(min(len(session.tokens), max(0, len(tokens) - 1)))


class NeverRequestedAgain(Drafting):
    """Request no drafts any more after the first failure."""

    def _cool_down(self, now: int) -> None:
        super()._cool_down(now)
        self._off_until = math.inf  # type: ignore[assignment]  # beyond all time


class NeverCloses(Breaker):
    """Ignore a successful probe, so that the circuit stays open."""

    def record_success(self, attempt: int) -> bool:
        return not self._probing and super().record_success(attempt)


def _only_accepted_once(draft: DraftReplica) -> bool:
    return not draft.is_accepted


def _unchecked(_stored: StoredSession, _next_index: int, _seen_hash: bytes) -> int:
    """Let every Resume pass, as if nothing of the answer were left."""
    return 0


_exchange = SimStore.exchange


async def _own_bucket(store: SimStore, bucket: TokenBucket, exchange: Exchange) -> Exchanged:
    """Keep a bucket for each gateway."""
    own = replace(bucket, principal=f"{bucket.principal} at {store._caller.name}")
    return await _exchange(store, own, exchange)


async def _no_renewal(_log: SessionLog) -> None:
    await asyncio.Future()


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault; `breaks` is the text of the rule that finds it, `patches` replaces objects by name."""

    name: str
    breaks: str
    kinds: Kinds = field(default_factory=Kinds)
    patches: Mapping[str, object] = field(default_factory=dict)
    theme: str = ""

    @contextmanager
    def put_in(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, replacement in self.patches.items():
                stack.enter_context(mock.patch(name, replacement))
            yield


MUTANTS = (
    Mutant(
        "streams before the commit",
        "which the log never held",
        patches={"services.gateway.session.streams.Session": StreamsBeforeCommit},
    ),
    Mutant("does not fence", "wrote after a later claim", Kinds(sessions=NoFencing)),
    Mutant("appends a repeated commit", "the truth is", Kinds(sessions=AppendsTwice)),
    Mutant("refuses a repeated commit", _REFUSED, Kinds(sessions=RefusesRepeats)),
    Mutant(
        "executes claims that were given up",
        "given up",
        Kinds(sessions=Unconditional),
        {
            "services.gateway.session.streams.Streams._change": _changed_any_time,
            "tests.simulation.system.redis.SimStore.read": _read_at_once,
        },
    ),
    Mutant(
        "claims before it checks a Resume",
        "was refused, but has replaced an owner",
        patches={"services.gateway.session.streams.check_resume": _unchecked},
    ),
    Mutant("draws noise by round", "the truth is", Kinds(engine=NoiseByRound)),
    Mutant(
        "trusts a cache by length",
        "the truth is",
        patches={"galley.core.kv.session.KvSession.restore": _trusting_length},
        theme="wandering",
    ),
    Mutant(
        "never closes a breaker",
        "was not drafted for again",
        patches={"services.gateway.replicas.drafts.Breaker": NeverCloses},
        theme="failing draft",
    ),
    Mutant(
        "never requests a draft again after a failure",
        "was not drafted for again",
        patches={"galley.core.session.machine.Drafting": NeverRequestedAgain},
    ),
    Mutant(
        "never reconnects to a draft",
        "was not drafted for again",
        patches={"services.gateway.replicas.drafts.DraftReplica.is_unknown": _only_accepted_once},
    ),
    Mutant(
        "does not renew a session",
        "its session has expired",
        patches={"services.gateway.store.session_log.SessionLog.keep_alive": _no_renewal},
        theme="standing still",
    ),
    Mutant(
        "counts tokens for each gateway",
        "tokens, at most",
        patches={"tests.simulation.system.redis.SimStore.exchange": _own_bucket},
        theme="metered",
    ),
)
