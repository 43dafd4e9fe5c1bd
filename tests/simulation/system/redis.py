"""The simulated Redis: the sessions of a `MemoryStore`, the leases of replicas, and the faults of a server.

It may be down, lose its latest writes in a crash or a fail-over, damage a log, have its clock set, and lose,
delay or repeat messages. A call that its caller has given up may still be executed later.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, TypeVar

from galley.common.registry.leases import LeasePool, Replaced
from galley.core.errors import GalleyError, StoreUnavailable
from galley.core.routing.choice import ReplicaLease, TargetLease
from galley.core.store import (
    UNCHANGED,
    Exchange,
    Exchanged,
    KvDirectory,
    LogHashes,
    NewSession,
    Ownership,
    SessionEnded,
    SessionStore,
    StoredSession,
    TokenBucket,
)
from galley.core.versions.counts import VersionCounts
from galley.core.versions.state import VersionEvent, VersionState
from services.gateway.audit.records import rest_ms
from services.gateway.store import session_log
from tests.fakes.store import MemoryStore
from tests.fakes.versions import MemoryVersions
from tests.simulation.ledger import Ledger
from tests.simulation.schedule import Schedule
from tests.simulation.system.call import Call, current_call
from tests.simulation.system.copies import Copies
from tests.simulation.system.loop import Process
from tests.simulation.system.network import Network

T = TypeVar("T")

REDIS = "redis"
_TURN_S = 150.0
_ROUNDING_S = 0.05
"""Time by which a change may seem too late: its gateway reads the clock before."""
_COPIED_WITHIN = 0.8
"""Share of a call's time in which the replicas must have its change."""


class Sessions(MemoryStore):
    """The rules of the scripts; `state` and `restore` return the server to an earlier state."""

    def __init__(self, *times: float, clock: Callable[[], float]) -> None:
        super().__init__(*times, clock=clock)
        self._damaged: dict[str, list[int]] = {}
        """The tokens that the damaged logs held before."""

    def holds(self, session_id: str) -> bool:
        return self._find(session_id) is not None

    def held(self, session_id: str) -> tuple[list[int], bytes]:
        """Return log and metadata as they would be without damage."""
        record, before = self._records[session_id], self._damaged.get(session_id)
        tokens = record.tokens if before is None else [*before, *record.tokens[len(before) :]]
        return tokens, record.meta

    def lengths(self) -> dict[str, int]:
        return {of: len(self.held(of)[0]) for of in list(self._records) if self.holds(of)}

    def copied_lengths(self) -> dict[str, int]:
        """Return the lengths of all logs that a replica has got, of sessions that have expired too."""
        return {of: len(record.tokens) for of, record in self._records.items()}

    def damage(self, session_id: str, share: float, *, tear: bool) -> None:
        """Flip a bit of the token at a `share` of the log, or tear off the log from there on."""
        tokens = self._records[session_id].tokens
        self._damaged[session_id] = list(self.held(session_id)[0])
        (self.tear if tear else self.flip)(session_id, int(share * len(tokens)))

    def _make(self, new: NewSession, epoch: int, nonce: bytes) -> Any:
        self._damaged.pop(new.session_id, None)
        return super()._make(new, epoch, nonce)

    def flip(self, session_id: str, at: int) -> None:
        """Change a bit of token `at`, as a fault of the server's memory or disk does."""
        record = self._find(session_id)
        if record is not None and at < len(record.tokens):
            record.tokens[at] ^= 1

    def tear(self, session_id: str, at: int) -> None:
        """Keep only the first `at` tokens of a log."""
        record = self._find(session_id)
        if record is not None:
            del record.tokens[at:]

    def is_finished(self, session_id: str) -> bool:
        record = self._find(session_id)
        return record is not None and record.state == "finished"

    def state(self) -> object:
        return deepcopy((self._records, self._aborted, self._buckets, self._damaged))

    def restore(self, state: Any) -> None:
        self._records, self._aborted, self._buckets, self._damaged = deepcopy(state)

    def entry(self, session_id: str) -> Any:
        """Return what a replica gets of a session: changes, and so no damage."""
        record = self._records.get(session_id)
        if record is not None:
            record = self._copy_of(record, self.held(session_id)[0])
        return record, self._aborted.get(session_id)

    def entries(self) -> dict[str, Any]:
        return {of: self.entry(of) for of in [*self._records, *self._aborted]}

    def adopt(self, entries: dict[str, Any]) -> None:
        """Hold what a replica has got."""
        self._records = {of: record for of, (record, _) in entries.items() if record is not None}
        self._aborted = {of: aborted for of, (_, aborted) in entries.items() if aborted is not None}
        self._damaged = {}


def at_once(work: Coroutine[Any, Any, T]) -> T:
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise RuntimeError("the model of the store waits")


class Leases:
    """A model of the replica registry and its scripts: a replaced incarnation is refused for good."""

    def __init__(self, lease_s: float, clock: Callable[[], float]) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._held: dict[tuple[str, str], tuple[ReplicaLease, float]] = {}
        self._latest: dict[tuple[str, str], int] = {}
        self._numbers = 0

    def next_number(self) -> int:
        """Return the number of a new incarnation: higher than all before."""
        self._numbers += 1
        return self._numbers

    def publish(self, pool: str, lease: ReplicaLease, number: int) -> None:
        if number < self._latest.get((pool, lease.address), 0):
            raise Replaced(lease.address)
        self._latest[pool, lease.address] = number
        self._held[pool, lease.address] = lease, self._clock() + self._lease_s

    def withdraw(self, pool: str, address: str, incarnation: str) -> None:
        held = self._held.get((pool, address))
        if held is not None and held[0].incarnation == incarnation:
            del self._held[pool, address]

    def read(self, pool: str) -> list[ReplicaLease]:
        now_s = self._clock()
        return [
            lease
            for (of, _), (lease, expires_s) in sorted(self._held.items(), key=lambda item: item[0])
            if of == pool and expires_s > now_s
        ]

    def clear(self) -> None:
        self._held.clear()
        self._latest.clear()


class Turns:
    """A model of the turns to audit and their scripts: the nonce and end of the turn at each address."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: dict[str, tuple[object, float]] = {}

    def wait_ms(self, address: str) -> int:
        _, left_s = self._find(address)
        return round(1000 * max(0.0, left_s))

    def begin(self, address: str, nonce: object) -> int:
        held, left_s = self._find(address)
        if left_s > 0 and held is not nonce:
            return max(1, round(1000 * left_s))
        self._held[address] = nonce, self._clock() + _TURN_S
        return 0

    def end(self, address: str, nonce: object, compute_ns: int) -> None:
        held, left_s = self._find(address)
        if left_s <= 0 or held is nonce:
            self._held[address] = None, self._clock() + rest_ms(compute_ns) / 1000

    def _find(self, address: str) -> tuple[object, float]:
        held, ends_s = self._held.get(address, (None, -math.inf))
        return held, ends_s - self._clock()


class SimRedis:
    """The server, whose clock is `ahead_s`, and its replicas."""

    def __init__(
        self,
        network: Network,
        ledger: Ledger,
        schedule: Schedule,
        finished_ttl_s: float,
        kind: type[Sessions] = Sessions,
        copies: type[Copies] = Copies,
    ) -> None:
        timing = self.timing = schedule.timing
        self._loop = network.loop
        self.ahead_s = 0.0
        self.sessions = kind(timing.ttl_s, finished_ttl_s, clock=self._now_s)
        self.leases = Leases(timing.lease_s, self._now_s)
        self.versions = MemoryVersions()
        self.turns = Turns(self._now_s)
        self.copies = copies(network, REDIS, schedule.replicas, schedule.copies)
        self.up = True
        self.lossy = 0.0
        self.repeat = 0.0
        self._network = network
        self.ledger = ledger

    def _now_s(self) -> float:
        return self._loop.now_s + self.ahead_s

    def crash(self) -> None:
        self.up = False
        self.copies.forget_calls()

    def come_back(self, state: object | None) -> None:
        self.up = True
        if state is not None:
            before = self.sessions.lengths()
            self.sessions.restore(state)
            self.copies.follow(self.sessions)
            self.leases.clear()
            self.versions = MemoryVersions()
            self.ledger.rolled_back(before, self.sessions.lengths())

    def fail_over(self, *, latest: bool) -> None:
        """Go on with a replica: the one that has most, as Sentinel chooses it, or another."""
        self.up, before, copies = True, self.sessions.lengths(), self.copies
        if copies.promote(self.sessions, latest=latest):
            keeps = copies.wanted == len(copies.all) or (latest and copies.wanted > 0)
            copied = self.sessions.copied_lengths() if keeps else None
            self.ledger.rolled_back(before, self.sessions.lengths(), copied)

    async def call(
        self, caller: Process, work: Callable[[], T], writes: str = "", *, repeats: bool = True
    ) -> T:
        """Return the result of `work`, which changes the session `writes`, or no session.

        A call that `repeats` may be made twice, as `retry` does after a lost reply.
        """
        loop = self._loop
        reply: asyncio.Future[T] = loop.create_future()
        for _ in range(min(self._copies(caller), 1 + repeats)):
            at_s = self._network.arrival_s(caller.name, REDIS)
            loop.call_at(at_s, self._carry_out, caller, work, reply, writes)
        timer = loop.call_later(self.timing.call_s, _give_up, reply)
        try:
            return await reply
        finally:
            timer.cancel()

    def _copies(self, caller: Process) -> int:
        if not caller.alive or self._is_lost(caller.name, REDIS):
            return 0
        return 1 + (self._network.draw(caller.name, "repeat") < self.repeat)

    def _is_lost(self, sender: str, receiver: str) -> bool:
        return self.lossy > 0 and self._network.draw(sender, receiver) < self.lossy

    def _carry_out(
        self, caller: Process, work: Callable[[], T], reply: asyncio.Future[T], writes: str
    ) -> None:
        result: T | GalleyError
        try:
            if not self.up:
                raise StoreUnavailable("the session store is unavailable", "connection refused")
            result = work()
        except GalleyError as error:
            self.ledger.met[f"store: {type(error).__name__}"] += 1
            result = error
        offset = self.copies.wrote(self.sessions, writes) if writes and self.up else 0
        if isinstance(result, GalleyError) or not (writes and self.copies.wanted):
            self._send(caller, reply, result)
            return
        late = StoreUnavailable("the session store's replicas do not have the change yet")
        self._loop.call_later(_COPIED_WITHIN * self.timing.call_s, self._send, caller, reply, late)
        self.copies.when_copied(offset, partial(self._send, caller, reply, result))

    def _send(self, caller: Process, reply: asyncio.Future[T], result: T | GalleyError) -> None:
        if not reply.done() and not self._is_lost(REDIS, caller.name):
            at_s = self._network.arrival_s(REDIS, caller.name)
            self._loop.call_at(at_s, _reply, caller, reply, result)


def _give_up(reply: asyncio.Future[Any]) -> None:
    if not reply.done():
        reply.set_exception(StoreUnavailable("the session store is unavailable", "timeout"))


def _reply(caller: Process, reply: asyncio.Future[T], result: T | GalleyError) -> None:
    if reply.done() or not caller.alive:
        return
    if isinstance(result, GalleyError):
        reply.set_exception(result)
    else:
        reply.set_result(result)


class SimStore(SessionStore):
    def __init__(self, redis: SimRedis, caller: Process, ledger: Ledger) -> None:
        self._redis = redis
        self._sessions = redis.sessions
        self._caller = caller
        self._ledger = ledger

    async def ping(self) -> None:
        """Return at once."""

    async def now_ms(self, session_id: str) -> int:
        return await self._redis.call(self._caller, lambda: at_once(self._sessions.now_ms(session_id)))

    async def read(self, session_id: str, principal: str) -> StoredSession:
        return await self._redis.call(
            self._caller, lambda: at_once(self._sessions.read(session_id, principal))
        )

    async def create(self, new: NewSession, nonce: bytes, latest_ms: int) -> StoredSession:
        call, began_s = current_call(), asyncio.get_running_loop().time()

        def create() -> StoredSession:
            is_new = not self._sessions.holds(new.session_id)
            stored = at_once(self._sessions.create(new, nonce, latest_ms))
            if is_new:
                self._ledger.made(new.session_id)
            if stored.ownership.nonce == nonce:
                self._owned(stored, call, began_s)
            return stored

        return self._read(await self._redis.call(self._caller, create, new.session_id))

    async def claim(self, former: Ownership, principal: str, nonce: bytes, latest_ms: int) -> StoredSession:
        call, began_s = current_call(), asyncio.get_running_loop().time()

        def claim() -> StoredSession:
            stored = at_once(self._sessions.claim(former, principal, nonce, latest_ms))
            self._owned(stored, call, began_s)
            return stored

        return self._read(await self._redis.call(self._caller, claim, former.session_id))

    def _read(self, stored: StoredSession) -> StoredSession:
        self._ledger.acknowledged(stored.ownership.session_id, len(stored.tokens))
        return stored

    def _owned(self, stored: StoredSession, call: Call | None, began_s: float) -> None:
        if self._ledger.owned(stored, self._caller.name, call):
            self._must_be_in_time("owns a session", began_s)

    @staticmethod
    def _changes(call: Call | None) -> None:
        """Note that a call has changed a session: it must not be refused."""
        if call is not None:
            call.has_changed = True

    def _must_be_in_time(self, what: str, since_s: float) -> None:
        """Check that a change, tried at `since_s`, is not executed after all its retries.

        Once the store's clock was set back, one that is on its way may still be.
        """
        timing = self._redis.timing
        late_s = asyncio.get_running_loop().time() - timing.store_s - session_log.LAST_CALL_S
        is_set_back = self._ledger.stepped_back_s >= since_s - timing.call_s
        if since_s < late_s - _ROUNDING_S and not is_set_back:
            self._ledger.violate(f"{self._caller.name} {what} by a call that it has given up")

    async def commit(
        self,
        owner: Ownership,
        expected_len: int,
        tokens: Sequence[int],
        meta: bytes,
        hashes: LogHashes,
        directory: KvDirectory = UNCHANGED,
    ) -> int:
        call = current_call()

        def commit() -> int:
            length = self._sessions.append(owner, expected_len, tokens, meta, hashes, directory)
            self._changes(call)
            self._ledger.committed(owner, *self._sessions.held(owner.session_id))
            return length

        length = await self._by_owner(owner, commit)
        self._ledger.acknowledged(owner.session_id, expected_len + len(tokens))
        return length

    async def finish(self, owner: Ownership, expected_len: int, finish: bytes, log_hash: bytes) -> None:
        call = current_call()

        def store_finish() -> None:
            at_once(self._sessions.finish(owner, expected_len, finish, log_hash))
            self._changes(call)
            self._ledger.finished(owner, *self._sessions.held(owner.session_id), call)

        await self._by_owner(owner, store_finish)

    async def recreate(self, owner: Ownership, new: NewSession, latest_ms: int) -> None:
        call, began_s = current_call(), asyncio.get_running_loop().time()

        def recreate() -> None:
            lost = not self._sessions.holds(owner.session_id)
            at_once(self._sessions.recreate(owner, new, latest_ms))
            if lost:
                self._changes(call)
                self._must_be_in_time("makes a session anew", began_s)
                self._ledger.made_anew(owner)

        await self._by_owner(owner, recreate)

    async def renew(self, owner: Ownership) -> None:
        await self._by_owner(owner, lambda: at_once(self._sessions.renew(owner)))

    async def _by_owner(self, owner: Ownership, work: Callable[[], T]) -> T:
        try:
            return await self._redis.call(self._caller, work, owner.session_id)
        except SessionEnded:
            self._ledger.knows_end(owner.session_id, current_call())
            raise

    async def abort(self, session_id: str, principal: str, finish: bytes, latest_ms: int) -> None:
        call, began_s = current_call(), asyncio.get_running_loop().time()

        def abort() -> None:
            was_live = not self._sessions.is_finished(session_id)
            at_once(self._sessions.abort(session_id, principal, finish, latest_ms))
            self._must_be_in_time("aborts a session", began_s)
            if was_live:
                self._changes(call)
                self._ledger.has_aborted(session_id)

        await self._redis.call(self._caller, abort, session_id)

    async def delete(self, session_id: str, principal: str, latest_ms: int) -> None:
        call, began_s = current_call(), asyncio.get_running_loop().time()

        def delete() -> None:
            held = self._sessions.holds(session_id)
            at_once(self._sessions.delete(session_id, principal, latest_ms))
            self._must_be_in_time("deletes a session", began_s)
            if held:
                self._changes(call)
                self._ledger.deleted(session_id)

        await self._redis.call(self._caller, delete, session_id)

    async def exchange(self, bucket: TokenBucket, exchange: Exchange) -> Exchanged:
        return await self._redis.call(
            self._caller, lambda: at_once(self._sessions.exchange(bucket, exchange)), repeats=False
        )

    async def close(self) -> None:
        """Do nothing: the store holds no connection."""


class SimRegistry:
    """The registry as one process reaches it: the parts of `ReplicaRegistry` that are used."""

    def __init__(self, redis: SimRedis, caller: Process) -> None:
        self._redis = redis
        self._caller = caller
        self._ledger = redis.ledger
        self._numbers: dict[str, int] = {}

    async def publish(self, pool: LeasePool[Any], lease: ReplicaLease) -> None:
        leases = self._redis.leases
        if lease.incarnation not in self._numbers:
            self._numbers[lease.incarnation] = await self._redis.call(self._caller, leases.next_number)
        number = self._numbers[lease.incarnation]
        if isinstance(lease, TargetLease):
            self._ledger.published(lease.address, lease.cached_prefixes)
        await self._redis.call(self._caller, lambda: leases.publish(pool.name, lease, number))

    async def withdraw(self, pool: LeasePool[Any], address: str, incarnation: str) -> None:
        await self._redis.call(
            self._caller, lambda: self._redis.leases.withdraw(pool.name, address, incarnation)
        )

    async def read(self, pool: LeasePool[Any]) -> list[Any]:
        return await self._redis.call(self._caller, lambda: self._redis.leases.read(pool.name))

    async def close(self) -> None:
        pass


class SimVersions:
    """The versions of drafts as one process reaches them."""

    def __init__(self, redis: SimRedis, caller: Process) -> None:
        self._redis = redis
        self._caller = caller

    async def read(self) -> VersionState:
        return await self._call(self._redis.versions.read)

    async def change(self, expected_epoch: int, new: VersionState, event: VersionEvent) -> bool:
        latest_ms = self._now_ms() + round(1000 * self._redis.timing.call_s)

        def change() -> Coroutine[Any, Any, bool]:
            if self._now_ms() >= latest_ms:
                raise StoreUnavailable("the session store is unavailable", "a call reached it too late")
            return self._redis.versions.change(expected_epoch, new, event)

        return await self._call(change)

    async def add(self, version: str, counts: VersionCounts, trial: int) -> bool:
        return await self._call(lambda: self._redis.versions.add(version, counts, trial))

    async def counts(self, of: Collection[str]) -> Mapping[str, VersionCounts]:
        return await self._call(lambda: self._redis.versions.counts(of))

    async def history(self) -> list[VersionEvent]:
        return await self._call(self._redis.versions.history)

    async def close(self) -> None:
        pass

    def _now_ms(self) -> int:
        return at_once(self._redis.sessions.now_ms(""))

    async def _call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return await self._redis.call(self._caller, lambda: at_once(work()), repeats=False)
