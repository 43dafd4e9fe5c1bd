"""The session store in Redis: one server-side script for each change."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, cast

from galley.common.redis.calls import DEFAULT_CALL_TIMEOUT_S, Copies, RedisCalls, Script, script_of
from galley.common.registry.leases import DEFAULT_POOL
from galley.core.content import prefix_hash_of_bytes, token_bytes, tokens_from_bytes
from galley.core.errors import (
    Broken,
    Fenced,
    KeyReused,
    LogLost,
    StoreUnavailable,
    UnknownSession,
)
from galley.core.store import (
    FINISHED_TTL_S,
    LARGEST_CLOCK_STEP_S,
    SESSION_TTL_S,
    UNCHANGED,
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
    SessionStore,
    State,
    StoredSession,
    TokenBucket,
    request_hash,
)

NONCE_BYTES = 16
DEFAULT_MAX_CONNECTIONS = 32

# The default of hash-max-listpack-value. Redis keeps a hash without longer values in one block, a quarter as
# large; with one longer value, each field is an allocation of its own.
_COMPACT_BYTES = 64
_MOST_COMPACT_BYTES = 4096
_PIECE_TOKENS = 32 * 1024
"""Tokens that are read or written before others get a turn: about 1 ms."""
_PIECE = "#"
_STATES: Mapping[bytes, State] = {b"live": "live", b"finished": "finished"}
_SCRIPTS = Path(__file__).parent / "scripts"
_POOLS = ("draft", "target")
_OWN_FIELDS = frozenset(
    {"principal", "body_hash", "prompt_len", "log_hash", "request_hash"}
    | {"epoch", "nonce", "state", "finish", "created_ms", "claimed_ms"}
    | {f"{pool}_{what}" for pool in _POOLS for what in ("replica", "incarnation", "kv_len")}
)


def _load(name: str) -> Script:
    return script_of((_SCRIPTS / "owner.lua").read_text() + (_SCRIPTS / f"{name}.lua").read_text())


class RedisStore(SessionStore):
    """Sessions of the pool `pool_name` at `url` (`galley.common.redis.url`).

    The keys of a session are `galley:sessions:POOL:{ID}`, `...:log`, `...:meta` and `...:aborted`. They carry
    the pool, so that no deployment resumes a session of another one that shares its Redis. Only the id is
    their hash tag, so that a pool's sessions are spread over a cluster. The token bucket of a principal is
    `galley:budgets:POOL:{PRINCIPAL}`.

    `ttl_s` is how long a live session outlasts its last change or renewal, `finished_ttl_s` how long a
    finished one can be resumed. Every call is one attempt, bounded as in `RedisCalls`; `retry` repeats it.
    With `copies`, a change succeeds only once that many replicas have it. Otherwise it raises
    StoreUnavailable: the change may be in the log or lost, and its repeat finds out which.
    """

    def __init__(
        self,
        url: str,
        ttl_s: float = SESSION_TTL_S,
        finished_ttl_s: float = FINISHED_TTL_S,
        *,
        pool_name: str = DEFAULT_POOL,
        call_timeout_s: float = DEFAULT_CALL_TIMEOUT_S,
        max_connections: int = DEFAULT_MAX_CONNECTIONS,
        copies: Copies | None = None,
    ) -> None:
        self._calls = RedisCalls(
            url,
            call_timeout_s=call_timeout_s,
            max_connections=max_connections,
            copies=copies,
        )
        self._prefix = f"galley:sessions:{pool_name}:"
        self._budgets = f"galley:budgets:{pool_name}:"
        self._ttl_ms = _milliseconds(ttl_s)
        self._finished_ttl_ms = _milliseconds(finished_ttl_s)
        self._aborted_ttl_ms = self._finished_ttl_ms + _milliseconds(LARGEST_CLOCK_STEP_S)
        self._read = _load("read")
        self._create = _load("create")
        self._claim = _load("claim")
        self._commit = _load("commit")
        self._finish = _load("finish")
        self._abort = _load("abort")
        self._delete = _load("delete")
        self._renew = _load("renew")
        self._recreate = _load("recreate")
        self._budget = script_of((_SCRIPTS / "budget.lua").read_text())

    async def ping(self) -> None:
        await self._calls.command("PING")

    async def now_ms(self, session_id: str) -> int:
        return await self._calls.now_ms(self._keys(session_id)[0])

    async def read(self, session_id: str, principal: str) -> StoredSession:
        # Not `_run`: nothing changes, so there are no replicas to wait for.
        reply = await self._calls.run(self._read, self._keys(session_id), principal)
        *session, lives_ms = _result(session_id, reply)
        return replace(await _stored(session_id, *session), idle_ms=self._ttl_ms - lives_ms)

    async def create(self, new: NewSession, nonce: bytes, latest_ms: int) -> StoredSession:
        """Raise also ValueError, for names of fields that the store uses itself."""
        ttls = (self._ttl_ms, self._finished_ttl_ms)
        args = (latest_ms, new.principal, nonce, *ttls, *await _content(new))
        return await _stored(new.session_id, *await self._run(self._create, new.session_id, *args))

    async def claim(self, former: Ownership, principal: str, nonce: bytes, latest_ms: int) -> StoredSession:
        args = (latest_ms, principal, former.epoch, former.nonce, nonce)
        reply = await self._run(self._claim, former.session_id, *args, self._ttl_ms, self._finished_ttl_ms)
        return await _stored(former.session_id, *reply)

    def commit(
        self,
        owner: Ownership,
        expected_len: int,
        tokens: Sequence[int],
        meta: bytes,
        hashes: LogHashes,
        directory: KvDirectory = UNCHANGED,
    ) -> asyncio.Future[int]:
        of = (owner.epoch, owner.nonce, expected_len)
        args = (*of, token_bytes(tokens), meta, *hashes, self._ttl_ms, *_directory_fields(directory))
        return self._calls.change(
            self._commit,
            self._keys(owner.session_id),
            args,
            lambda reply: int(_result(owner.session_id, reply, owner.epoch)[0]),
        )

    async def finish(self, owner: Ownership, expected_len: int, finish: bytes, log_hash: bytes) -> None:
        args = (expected_len, finish, log_hash, self._finished_ttl_ms)
        await self._run_owned(self._finish, owner, *args)

    async def recreate(self, owner: Ownership, new: NewSession, latest_ms: int) -> None:
        args = (latest_ms, self._ttl_ms, new.principal, *await _content(new))
        await self._run_owned(self._recreate, owner, *args)

    async def renew(self, owner: Ownership) -> None:
        await self._run_owned(self._renew, owner, self._ttl_ms)

    async def abort(self, session_id: str, principal: str, finish: bytes, latest_ms: int) -> None:
        args = (latest_ms, principal, finish, self._finished_ttl_ms, self._aborted_ttl_ms)
        await self._run(self._abort, session_id, *args)

    async def delete(self, session_id: str, principal: str, latest_ms: int) -> None:
        await self._run(self._delete, session_id, latest_ms, principal, self._aborted_ttl_ms)

    async def exchange(self, bucket: TokenBucket, exchange: Exchange) -> Exchanged:
        # Not `_run`: no replicas are waited for. One that is promoted without the latest changes admits more.
        needed = -1 if exchange.needed is None else exchange.needed
        args = (repr(bucket.per_s), repr(bucket.burst), exchange.returned, needed, exchange.ahead)
        reply = await self._calls.run(self._budget, (f"{self._budgets}{{{bucket.principal}}}",), *args)
        granted, leased, level = cast("tuple[int, int, bytes]", reply)
        return Exchanged(bool(granted), leased, float(level))

    async def close(self) -> None:
        await self._calls.close()

    async def _run_owned(self, script: Script, owner: Ownership, *args: bytes | str | int) -> list[Any]:
        all_args = (owner.epoch, owner.nonce, *args)
        return await self._run(script, owner.session_id, *all_args, epoch=owner.epoch)

    async def _run(
        self, script: Script, session_id: str, *args: bytes | str | int, epoch: int = 0
    ) -> list[Any]:
        """Return the script's reply after "ok", or raise its refusal; `epoch` is the owner's, 0 for none."""
        keys = self._keys(session_id)
        # The others can follow a slot that is being moved.
        if script in {self._create, self._abort, self._delete, self._recreate}:
            keys = (*keys, f"{keys[0]}:aborted")
        return await self._calls.change(script, keys, args, lambda reply: _result(session_id, reply, epoch))

    def _keys(self, session_id: str) -> tuple[str, ...]:
        key = f"{self._prefix}{{{session_id}}}"
        return key, key + ":log", key + ":meta"


def _result(session_id: str, reply: object, epoch: int = 0) -> list[Any]:
    outcome, *rest = cast("list[Any]", reply)
    if outcome != b"ok":  # so nothing was written
        _refuse(session_id, outcome.decode(), rest, epoch)
    return rest


async def _content(new: NewSession) -> list[bytes | str | int]:
    if not new.prompt or not new.body_hash:
        raise ValueError("prompt and body_hash: must not be empty")
    fields = [part for pair in _pieces(new.fields) for part in pair]
    pieces = []
    for at in range(0, len(new.prompt), _PIECE_TOKENS):
        pieces.append(token_bytes(new.prompt[at : at + _PIECE_TOKENS]))
        if at:
            await asyncio.sleep(0)
    prompt = b"".join(pieces)
    hashes = (prefix_hash_of_bytes(prompt), new.request_hash)
    return [new.body_hash, len(new.prompt), prompt, *hashes, *fields]


def _pieces(fields: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield the fields as stored: a long one in several, named `spec`, `spec#1`, `spec#2` ...

    A very long one is whole: Redis keeps so many pieces in no block, and a script takes 8,000 arguments.
    """
    if taken := [name for name in fields if name in _OWN_FIELDS or _PIECE in name]:
        raise ValueError(f"fields: must not have names that the store uses itself, got {sorted(taken)}")
    for name, value in fields.items():
        size = _COMPACT_BYTES if len(value) <= _MOST_COMPACT_BYTES else len(value)
        yield name, value[:size]
        for number, at in enumerate(range(size, len(value), size), 1):
            yield f"{name}{_PIECE}{number}", value[at : at + size]


def _joined(values: Mapping[str, bytes]) -> dict[str, bytes]:
    fields = {name: value for name, value in values.items() if name not in _OWN_FIELDS and _PIECE not in name}
    for name in fields:
        number = 1
        while (piece := values.get(f"{name}{_PIECE}{number}")) is not None:
            fields[name] += piece
            number += 1
    return fields


def _refuse(session_id: str, outcome: str, rest: list[Any], epoch: int) -> NoReturn:
    match outcome:
        case "unknown":
            raise UnknownSession(session_id)
        case "reused":
            raise KeyReused
        case "changed":
            raise OwnerChanged(session_id)
        case "late":
            raise StoreUnavailable("the session store is unavailable", "a call reached it too late")
        case "fenced":  # epochs only grow, unless the store has lost its latest writes
            raise ClaimLost(session_id) if int(rest[0]) < epoch else Fenced(session_id)
        case "ended":
            raise SessionEnded(session_id)
        case "behind":
            raise LogBehind(session_id, int(rest[0]), rest[1])
        case "lost":
            raise LogLost(f"the log of session {session_id!r} does not agree with its owner's")
        case _:
            raise Broken(f"session store: must return a known outcome, got {outcome!r}")


async def _stored(session_id: str, flat: list[bytes], log: bytes, meta: bytes) -> StoredSession:
    tokens: list[int] = []
    try:
        for at in range(0, len(log), 4 * _PIECE_TOKENS):
            tokens += tokens_from_bytes(log[at : at + 4 * _PIECE_TOKENS])
            if at:
                await asyncio.sleep(0)
        values = dict(zip((name.decode() for name in flat[::2]), flat[1::2], strict=True))
        stored = _decoded(session_id, values, tokens, meta)
    except (KeyError, ValueError) as error:
        raise LogLost(f"the stored session {session_id!r} cannot be read") from error
    request = request_hash(stored.principal, stored.body_hash, stored.prompt_len, stored.fields)
    hashes = (prefix_hash_of_bytes(log), request)
    if hashes != (values.get("log_hash"), values.get("request_hash")):
        raise LogLost(f"the stored session {session_id!r} does not agree with its hash")
    return stored


def _decoded(session_id: str, values: Mapping[str, bytes], tokens: list[int], meta: bytes) -> StoredSession:
    return StoredSession(
        ownership=Ownership(session_id, int(values["epoch"]), values["nonce"]),
        principal=values["principal"].decode(),
        fields=_joined(values),
        prompt_len=int(values["prompt_len"]),
        tokens=tokens,
        meta=meta,
        state=_STATES[values["state"]],
        finish=values["finish"],
        created_ms=int(values["created_ms"]),
        claimed_ms=int(values["claimed_ms"]),
        body_hash=values["body_hash"],
        directory=KvDirectory(*(_held(values, pool) for pool in _POOLS)),
    )


def _held(values: Mapping[str, bytes], pool: str) -> CacheLocation | None:
    if f"{pool}_replica" not in values:
        return None
    return CacheLocation(
        values[f"{pool}_replica"].decode(),
        values[f"{pool}_incarnation"].decode(),
        int(values[f"{pool}_kv_len"]),
    )


def _directory_fields(directory: KvDirectory) -> list[str | int]:
    fields: list[str | int] = []
    if directory is UNCHANGED:
        return fields
    for pool, held in zip(_POOLS, (directory.draft, directory.target), strict=True):
        if held is not None:
            fields += [f"{pool}_replica", held.replica, f"{pool}_incarnation", held.incarnation]
            fields += [f"{pool}_kv_len", held.kv_len]
    return fields


def _milliseconds(seconds: float) -> int:
    return max(1, math.ceil(seconds * 1000))
