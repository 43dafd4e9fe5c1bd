"""Compare the simulated store with the real scripts on a real server: same random calls, same answers."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pytest
from redis import asyncio as redis_asyncio

from galley.core.errors import Fenced, GalleyError, KeyReused, LogLost, StoreUnavailable, UnknownSession
from galley.core.store import (
    CacheLocation,
    ClaimLost,
    Exchange,
    Exchanged,
    KvDirectory,
    LogBehind,
    LogHashes,
    NewSession,
    OwnerChanged,
    Ownership,
    SessionEnded,
    StoredSession,
    TokenBucket,
)
from services.gateway.store.redis import RedisStore
from tests.fakes.owners import hashes_of
from tests.fakes.redis_servers import VALKEY, Server, running
from tests.simulation.system.redis import Sessions, at_once

_RUNS = 24
_TTL_S, _FINISHED_TTL_S = 1000.0, 5000.0
_NAMES = ("session-a", "session-b")
_SLACK_S = 30.0
_CALLS = (
    *("create", "read", *["claim"] * 3, *["commit"] * 8, "finish", "renew", "recreate", "recreate"),
    *("abort", "abort", "delete", "server", "step", *["exchange"] * 4),
)
# One that ends live sessions, one that ends all, and one after which an abort is forgotten.
_STEPS_S = (2_000, 2_000, 6_000, 6_000, 100_000)
# Full within the longest step. A second of the real server fills too little to tell.
_BUCKETS = [TokenBucket("me", 0.001, 50.0), TokenBucket("you", 0.001, 3.0)]
_BUDGETS = "galley:budgets:default:"
_TIMED = frozenset({"create", "claim", "recreate", "abort", "delete"})
"""Calls whose last argument is their latest time, here in ms from now."""
_IN_TIME_MS, _LATE_MS = 60_000, -60_000

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: tuple[Any, ...] = ()
    answer: object = None


class Model(Sessions):
    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(_TTL_S, _FINISHED_TTL_S, clock=lambda: self.now_s)

    def is_full(self, bucket: TokenBucket) -> bool:
        return at_once(self.exchange(bucket, Exchange(0, None, 0))).level == bucket.burst

    def lives_s(self, session_id: str) -> float:
        record = self._find(session_id)
        return -1.0 if record is None else record.expires_s - self.now_s

    def state(self) -> object:
        return self.now_s, super().state()

    def restore(self, state: Any) -> None:
        self.now_s, records = state
        super().restore(records)


async def _outcome(call: Coroutine[Any, Any, T]) -> tuple[object, T | GalleyError]:
    try:
        result = await call
    except GalleyError as error:
        return (type(error), getattr(error, "have", None), getattr(error, "log_hash", None)), error
    if isinstance(result, Exchanged):
        return replace(result, level=round(result.level)), result
    if isinstance(result, StoredSession):
        return replace(result, created_ms=0, claimed_ms=0, idle_ms=0, fields=dict(result.fields)), result
    return result, result


class Real:
    def __init__(self, store: RedisStore, client: redis_asyncio.Redis) -> None:
        self._store = store
        self.client = client
        self._remembered: dict[int, dict[Any, tuple[int, Any]]] = {}

    async def run(self, call: Call) -> object:
        match call.name:
            case "begin":
                await self.client.flushall()
            case "remember":
                self._remembered[call.arguments[0]] = {
                    key: (await self.client.pttl(key), await self.client.dump(key))
                    for key in await self.client.keys()
                }
            case "roll back":
                await self.client.flushall()
                for key, (lives_ms, dumped) in self._remembered[call.arguments[0]].items():
                    await self.client.restore(key, lives_ms, dumped)
            case "step":
                await self._step(1000 * call.arguments[0])
            case "flip":
                name, at = call.arguments
                log = f"galley:sessions:default:{{{name}}}:log"
                if await self.client.strlen(log) > 4 * at:
                    bit = 32 * at + 7
                    await self.client.setbit(log, bit, 1 - await self.client.getbit(log, bit))
            case "tear":
                name, at = call.arguments
                log = f"galley:sessions:default:{{{name}}}:log"
                kept = await self.client.getrange(log, 0, 4 * at - 1) if at else b""
                if await self.client.exists(log):
                    await self.client.set(log, kept, keepttl=True)
            case name:
                arguments = await self._timed(call) if name in _TIMED else call.arguments
                return (await _outcome(getattr(self._store, name)(*arguments)))[0]
        return None

    async def _step(self, step_ms: int) -> None:
        """Shorten all lives, as a step of the server's clock does."""
        for key in await self.client.keys():
            await self.client.pexpire(key, await self.client.pttl(key) - step_ms)
            if _BUDGETS in str(key) and await self.client.exists(key):
                await self.client.hincrby(key, "at_us", -1000 * step_ms)

    async def _timed(self, call: Call) -> tuple[Any, ...]:
        *arguments, from_now_ms = call.arguments
        return (*arguments, await self._store.now_ms("any") + from_now_ms)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(VALKEY, "--appendfsync", "no") as server:
        yield server


@asynccontextmanager
async def real_at(server: Server) -> AsyncIterator[Real]:
    store = RedisStore(server.url, _TTL_S, _FINISHED_TTL_S, max_connections=1)
    client = redis_asyncio.Redis.from_url(server.url)
    try:
        yield Real(store, client)
    finally:
        await store.close()
        await client.aclose()


async def test_random_calls_and_expiry_match_the_scripts(server: Server) -> None:
    refusals: set[object] = set()
    async with real_at(server) as real:
        for seed in range(_RUNS):
            model = Random(seed)
            await real.run(Call("begin"))
            for _ in range(60):
                call = model.next_call()
                assert await real.run(call) == call.answer, (seed, call)
                await _check_expiry(real, model)
                refusals.update(call.answer[:1] if isinstance(call.answer, tuple) else ())
    assert refusals == {
        *(ClaimLost, Fenced, SessionEnded, LogBehind, LogLost, KeyReused, UnknownSession),
        *(OwnerChanged, StoreUnavailable),
    }


async def _check_expiry(real: Real, model: Random) -> None:
    for name in _NAMES:
        key = f"galley:sessions:default:{{{name}}}"
        lives_s = [await real.client.pttl(of) / 1000 for of in (key, f"{key}:log", f"{key}:meta")]
        due_s = model.store.lives_s(name)
        assert all(abs(life_s - due_s) < _SLACK_S for life_s in lives_s) or due_s < 0 > max(lives_s)
    for bucket in _BUCKETS:
        is_held = await real.client.exists(f"{_BUDGETS}{{{bucket.principal}}}")
        assert is_held or model.store.is_full(bucket), "a bucket that is not full must not expire"


class Random:
    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.store = Model()
        self._states: list[object] = []
        self._owners: list[Ownership] = []
        self._length = 2
        self._has_stepped = False

    def next_call(self) -> Call:
        rng = self._rng
        # The owner of a session that a step has expired takes it for lost.
        name = "recreate" if self._has_stepped else rng.choice(_CALLS)
        self._has_stepped = name == "step"
        match name:
            case "create":
                fields, body = {"f": b"v"}, rng.choice([b"one", b"one", b"two"])
                new = NewSession(self._name(), self._principal(), body, fields, (1, 2))
                return self._called(name, new, self._nonce(), self._latest_ms())
            case "read":
                return self._called(name, self._name(), self._principal())
            case "claim":
                return self._called(name, self._owner(), self._principal(), self._nonce(), self._latest_ms())
            case "commit":
                tokens = tuple(rng.choices([1, 2], k=rng.randrange(4)))
                draft, target = rng.choice([None, CacheLocation("d", "i", 3)]), CacheLocation("t", "j", 2)
                where = KvDirectory(draft, rng.choice([None, target]))
                owner, length = self._owner(), self._expected()
                hashes = self._hashes(owner, length, tokens)
                return self._called(name, owner, length, tokens, bytes(tokens), hashes, where)
            case "finish":
                owner, length = self._owner(), self._expected()
                log_hash = self._hashes(owner, length, ()).before
                return self._called(name, owner, length, rng.choice([b"x", b"y"]), log_hash)
            case "renew":
                return self._called(name, self._owner())
            case "recreate":
                owner = self._owner()
                lost = NewSession(owner.session_id, "me", b"one", {"f": b"v"}, (1, 2))
                return self._called(name, owner, lost, self._latest_ms())
            case "exchange":
                exchange = Exchange(rng.randint(-9, 20), rng.choice([None, 0, 2, 10, 60]), rng.randrange(9))
                return self._called(name, rng.choice(_BUCKETS), exchange)
            case "abort" | "delete":
                finish = [b"aborted"] if name == "abort" else []
                return self._called(name, self._name(), self._principal(), *finish, self._latest_ms())
            case _:
                return self._server_event(name)

    def _server_event(self, name: str) -> Call:
        """Step its clock, remember its state, return it to an earlier one, or damage a log."""
        rng = self._rng
        if name == "step":
            step_s = rng.choice(_STEPS_S)
            self.store.now_s += step_s
            return Call("step", (step_s,))
        if rng.random() < 0.3:
            damaged = (self._name(), rng.randrange(2))
            how = rng.choice(["flip", "tear"])
            (self.store.flip if how == "flip" else self.store.tear)(*damaged)
            return Call(how, damaged)
        if self._states and rng.random() < 0.5:
            index = rng.randrange(len(self._states))
            self.store.restore(self._states[index])
            return Call("roll back", (index,))
        self._states.append(self.store.state())
        return Call("remember", (len(self._states) - 1,))

    def _called(self, name: str, *arguments: Any) -> Call:
        timed = arguments
        if name in _TIMED:
            timed = (*arguments[:-1], round(1000 * self.store.now_s) + arguments[-1])
        answer, result = at_once(_outcome(getattr(self.store, name)(*timed)))
        if isinstance(result, StoredSession):
            self._owners.append(result.ownership)
            self._length = len(result.tokens)
        elif isinstance(result, int):
            self._length = result
        return Call(name, arguments, answer)

    def _latest_ms(self) -> int:
        return self._rng.choice([*[_IN_TIME_MS] * 9, _LATE_MS])

    def _hashes(self, owner: Ownership, length: int, tokens: tuple[int, ...]) -> LogHashes:
        """Return the hashes of the model's log, or now and then others."""
        log = self.store.held(owner.session_id)[0] if self.store.holds(owner.session_id) else []
        hashes = hashes_of(log[:length], tokens)
        return hashes if self._rng.random() < 0.9 else LogHashes(b"?" * 16, b"!" * 16)

    def _expected(self) -> int:
        return max(0, self._length + self._rng.choice([0, 0, 0, -1, -2, 1]))

    def _name(self) -> str:
        return self._rng.choice(_NAMES)

    def _principal(self) -> str:
        return self._rng.choice(["me", "me", "me", "you"])

    def _nonce(self) -> bytes:
        return bytes([self._rng.randrange(4)]) * 16

    def _owner(self) -> Ownership:
        if not self._owners:
            return Ownership(self._name(), 1, b"?" * 16)
        return self._owners[-1] if self._rng.random() < 0.7 else self._rng.choice(self._owners)
