"""Compare the simulated store with the real scripts on a real server: same calls, same answers.

The calls come from simulated schedules (late, repeated and rolled back as they occur there), and at random.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import pytest
from redis import asyncio as redis_asyncio

from galley.core.errors import Fenced, GalleyError, KeyReused, LogLost, UnknownSession
from galley.core.store import (
    UNCHANGED,
    CacheLocation,
    ClaimLost,
    KvDirectory,
    LogBehind,
    NewSession,
    Ownership,
    SessionEnded,
    StoredSession,
)
from services.gateway.store.redis import RedisStore
from tests.fakes.redis_servers import VALKEY, Server, running
from tests.simulation.redis import Sessions, at_once
from tests.simulation.schedule import Fault, Schedule
from tests.simulation.seeds import schedule_of
from tests.simulation.world import Kinds, quiet, run_schedule

# The last because of what they are refused.
_SCHEDULES = (*range(1000, 1020), 1033, 1042, 1049, 1055)
_RANDOM_RUNS = 12
_TTL_S, _FINISHED_TTL_S = 1000.0, 5000.0
_NAMES = ("session-a", "session-b")
_SLACK_S = 30.0
_CALLS = (
    *("create", "claim", "claim", *["commit"] * 6, "finish", "renew", "recreate", "recreate", "abort"),
    "server",
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the store, or a restart of the server, and the model's answer."""

    name: str
    arguments: tuple[Any, ...] = ()
    answer: object = None


class Recorded(Sessions):
    """The model, which records every call and its answer in `calls`; nothing expires soon."""

    calls: ClassVar[list[Call]] = []

    def __init__(self, _ttl_s: float, _finished_ttl_s: float, **options: Any) -> None:
        super().__init__(_TTL_S, _FINISHED_TTL_S, **options)
        self._states = 0
        self.calls.append(Call("begin"))

    async def create(self, new: NewSession, nonce: bytes | None = None) -> StoredSession:
        return await self._noted("create", super().create(new, nonce), new, nonce)

    async def claim(self, session_id: str, principal: str, nonce: bytes | None = None) -> StoredSession:
        return await self._noted(
            "claim", super().claim(session_id, principal, nonce), session_id, principal, nonce
        )

    async def commit(
        self,
        owner: Ownership,
        expected_len: int,
        tokens: Sequence[int],
        meta: bytes,
        directory: KvDirectory = UNCHANGED,
    ) -> int:
        arguments = (owner, expected_len, tuple(tokens), meta, directory)
        return await self._noted("commit", super().commit(*arguments), *arguments)

    async def finish(self, owner: Ownership, expected_len: int, finish: bytes) -> None:
        await self._noted("finish", super().finish(owner, expected_len, finish), owner, expected_len, finish)

    async def recreate(self, owner: Ownership, new: NewSession) -> None:
        await self._noted("recreate", super().recreate(owner, new), owner, new)

    async def renew(self, owner: Ownership) -> None:
        await self._noted("renew", super().renew(owner), owner)

    async def abort(self, session_id: str, principal: str, finish: bytes) -> None:
        await self._noted(
            "abort", super().abort(session_id, principal, finish), session_id, principal, finish
        )

    async def _noted(self, name: str, call: Coroutine[Any, Any, T], *arguments: Any) -> T:
        answer, result = await _outcome(call)
        self.calls.append(Call(name, arguments, answer))
        if isinstance(result, GalleyError):
            raise result
        return result

    def expires_s(self, session_id: str) -> float:
        record = self._records.get(session_id)
        return -1.0 if record is None else record.expires_s - self._clock()

    def state(self) -> object:
        self._states += 1
        self.calls.append(Call("remember", (self._states,)))
        return self._states, super().state()

    def restore(self, state: Any) -> None:
        self.calls.append(Call("roll back", (state[0],)))
        super().restore(state[1])


async def _outcome(call: Coroutine[Any, Any, T]) -> tuple[object, T | GalleyError]:
    try:
        result = await call
    except GalleyError as error:
        return (type(error), getattr(error, "have", None)), error
    if isinstance(result, StoredSession):
        return replace(result, created_ms=0, fields=dict(result.fields)), result
    return result, result


class Real:
    """The real scripts on a real server, and the effects of a crash."""

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
            case name:
                return (await _outcome(getattr(self._store, name)(*call.arguments)))[0]
        return None


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


async def test_what_schedules_ask_is_answered_as_by_the_scripts(server: Server) -> None:
    names: set[str] = set()
    refusals: set[object] = set()
    async with real_at(server) as real:
        for seed in _SCHEDULES:
            for number, call in enumerate(await asyncio.to_thread(calls_of, seed)):
                assert await real.run(call) == call.answer, (seed, number, call)
                names.add(call.name)
                refusals.update(call.answer[:1] if isinstance(call.answer, tuple) else ())
    assert names >= {"create", "claim", "commit", "finish", "renew", "recreate", "abort", "roll back"}
    assert refusals >= {Fenced, SessionEnded, UnknownSession}


def calls_of(seed: int) -> list[Call]:
    class Once(Recorded):
        calls: ClassVar[list[Call]] = []

    with quiet():
        outcome = run_schedule(_schedule(seed), Kinds(sessions=Once))
    assert outcome.violation is None
    return Once.calls


async def test_random_calls_are_answered_as_by_the_scripts_and_expire_as_there(server: Server) -> None:
    refusals: set[object] = set()
    async with real_at(server) as real:
        for seed in range(_RANDOM_RUNS):
            model = Random(seed)
            await real.run(Call("begin"))
            for _ in range(60):
                call = model.next_call()
                assert await real.run(call) == call.answer, (seed, call)
                await _expires_alike(real, model)
                refusals.update(call.answer[:1] if isinstance(call.answer, tuple) else ())
    assert refusals == {ClaimLost, Fenced, SessionEnded, LogBehind, LogLost, KeyReused, UnknownSession}


async def _expires_alike(real: Real, model: Random) -> None:
    for name in _NAMES:
        key = f"galley:{{{name}}}"
        lives_s = [await real.client.pttl(of) / 1000 for of in (key, f"{key}:log", f"{key}:meta")]
        due_s = model.store.expires_s(name)
        assert all(abs(life_s - due_s) < _SLACK_S for life_s in lives_s) or due_s < 0 > max(lives_s)


def _schedule(seed: int) -> Schedule:
    """In turn: one of sessions that others take over, one whose clients abort, two that are any."""
    whole = schedule_of(seed, "" if seed % 4 else "taken over")
    aborts = (Fault(it.at_s + 0.4, "abort", (it.client,)) for it in whole.sessions)
    return whole.with_faults((*whole.faults, *aborts)) if seed % 4 == 1 else whole


class Random:
    """Random calls of few sessions, owners and tokens, and the model's answers."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.store = Recorded(0.0, 0.0, clock=lambda: 0.0)
        self._states: list[object] = []
        self._owners: list[Ownership] = []
        self._length = 2

    def next_call(self) -> Call:
        rng = self._rng
        match rng.choice(_CALLS):
            case "create":
                fields, body = {"f": b"v"}, rng.choice([b"one", b"one", b"two"])
                new = NewSession(self._name(), self._principal(), body, fields, (1, 2))
                self._do(self.store.create(new, self._nonce()))
            case "claim":
                self._do(self.store.claim(self._name(), self._principal(), self._nonce()))
            case "commit":
                tokens = tuple(rng.choices([1, 2], k=rng.randrange(4)))
                where = KvDirectory(draft=rng.choice([None, CacheLocation("d", "i", 3)]))
                expected = max(0, self._length + rng.choice([0, 0, 0, -1, -2, 1]))
                self._do(self.store.commit(self._owner(), expected, tokens, bytes(tokens), where))
            case "finish":
                self._do(self.store.finish(self._owner(), self._length, rng.choice([b"x", b"y"])))
            case "renew":
                self._do(self.store.renew(self._owner()))
            case "recreate":
                owner = self._owner()
                new = NewSession(owner.session_id, "me", b"one", {"f": b"v"}, (1, 2))
                self._do(self.store.recreate(owner, new))
            case "abort":
                self._do(self.store.abort(self._name(), self._principal(), b"aborted"))
            case _ if self._states and rng.random() < 0.5:
                self.store.restore(rng.choice(self._states))
            case _:
                self._states.append(self.store.state())
        return self.store.calls[-1]

    def _do(self, call: Coroutine[Any, Any, Any]) -> None:
        _, result = at_once(_outcome(call))
        if isinstance(result, StoredSession):
            self._owners.append(result.ownership)
            self._length = len(result.tokens)
        elif isinstance(result, int):
            self._length = result

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
