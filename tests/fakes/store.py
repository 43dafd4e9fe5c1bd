"""`SessionStore` in memory with the exact behaviour of `services.gateway.store.redis`, for tests."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter

from galley.core.content import prefix_hash
from galley.core.errors import Fenced, GalleyError, KeyReused, LogLost, StoreUnavailable, UnknownSession
from galley.core.store import (
    FINISHED_TTL_S,
    LARGEST_CLOCK_STEP_S,
    SESSION_TTL_S,
    UNCHANGED,
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
)


@dataclass(slots=True)
class _Record:
    principal: str
    body_hash: bytes
    fields: Mapping[str, bytes]
    prompt_len: int
    tokens: list[int]
    log_hash: bytes
    expires_s: float
    created_ms: int
    claimed_ms: int
    epoch: int = 1
    nonce: bytes = b""
    meta: bytes = b""
    state: State = "live"
    finish: bytes = b""
    directory: KvDirectory = field(default_factory=KvDirectory)


_VALUES = attrgetter(*(each.name for each in fields(_Record)))


class MemoryStore(SessionStore):
    """The session store in memory, shared by several gateways; `clock` is in seconds."""

    def __init__(
        self,
        ttl_s: float = SESSION_TTL_S,
        finished_ttl_s: float = FINISHED_TTL_S,
        *,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._ttl_s = ttl_s
        self._finished_ttl_s = finished_ttl_s
        self._clock = clock
        self._records: dict[str, _Record] = {}
        # What each principal's token bucket holds, and at what time.
        self._buckets: dict[str, tuple[float, float]] = {}
        # The sessions that were aborted or deleted: until when that is known, and whose a deleted one was.
        self._aborted: dict[str, tuple[float, str]] = {}

    async def ping(self) -> None:
        """Return at once."""

    async def now_ms(self, session_id: str) -> int:
        return self._now_ms()

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

    def _must_be_in_time(self, latest_ms: int) -> None:
        if self._now_ms() > latest_ms:
            raise StoreUnavailable("the session store is unavailable", "a call reached it too late")

    async def read(self, session_id: str, principal: str) -> StoredSession:
        record = self._of(session_id, principal)
        idle_s = self._clock() + self._ttl_s - record.expires_s
        return replace(_stored(session_id, record), idle_ms=int(idle_s * 1000))

    async def create(self, new: NewSession, nonce: bytes, latest_ms: int) -> StoredSession:
        if not new.prompt or not new.body_hash:
            raise ValueError("prompt and body_hash: must not be empty")
        self._must_be_in_time(latest_ms)
        record = self._find(new.session_id)
        if record is None:
            self._aborted.pop(new.session_id, None)
            record = self._make(new, 1, nonce)
        elif record.principal != new.principal or record.body_hash != new.body_hash:
            raise KeyReused
        elif record.nonce == nonce:
            self._touch(record)
        return _stored(new.session_id, record)

    def _make(self, new: NewSession, epoch: int, nonce: bytes) -> _Record:
        record = self._records[new.session_id] = _Record(
            new.principal,
            new.body_hash,
            dict(new.fields),
            len(new.prompt),
            list(new.prompt),
            prefix_hash(new.prompt),
            self._clock() + self._ttl_s,
            self._now_ms(),
            self._now_ms(),
            epoch,
            nonce,
        )
        return record

    async def claim(self, former: Ownership, principal: str, nonce: bytes, latest_ms: int) -> StoredSession:
        self._must_be_in_time(latest_ms)
        record = self._of(former.session_id, principal)
        self._must_have_its_prompt(former.session_id, record)
        if record.nonce != nonce:
            if (record.epoch, record.nonce) != (former.epoch, former.nonce):
                raise OwnerChanged(former.session_id)
            record.epoch += 1
            record.nonce = nonce
            record.claimed_ms = self._now_ms()
        self._touch(record)
        return _stored(former.session_id, record)

    def commit(
        self,
        owner: Ownership,
        expected_len: int,
        tokens: Sequence[int],
        meta: bytes,
        hashes: LogHashes,
        directory: KvDirectory = UNCHANGED,
    ) -> asyncio.Future[int]:
        length: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        try:
            length.set_result(self.append(owner, expected_len, tokens, meta, hashes, directory))
        except GalleyError as error:
            length.set_exception(error)
        return length

    def append(
        self,
        owner: Ownership,
        expected_len: int,
        tokens: Sequence[int],
        meta: bytes,
        hashes: LogHashes,
        directory: KvDirectory,
    ) -> int:
        """Carry out a commit."""
        record = self._owned(owner)
        have = len(record.tokens)
        if have < expected_len:
            raise LogBehind(owner.session_id, have, record.log_hash)
        if have > expected_len:
            there = record.tokens[expected_len : expected_len + len(tokens)]
            if there != list(tokens[: len(there)]):
                raise LogLost(owner.session_id)
            if len(there) < len(tokens):
                raise LogBehind(owner.session_id, have, record.log_hash)
            if have == expected_len + len(tokens) and record.log_hash != hashes.after:
                raise LogLost(owner.session_id)
        elif record.log_hash != hashes.before:
            raise LogLost(owner.session_id)
        else:
            record.tokens += tokens
            record.meta += meta
            record.log_hash = hashes.after
        record.directory = KvDirectory(
            directory.draft or record.directory.draft, directory.target or record.directory.target
        )
        self._touch(record)
        return len(record.tokens)

    async def finish(self, owner: Ownership, expected_len: int, finish: bytes, log_hash: bytes) -> None:
        record = self._find(owner.session_id)
        repeated = (owner.epoch, owner.nonce, "finished", finish)
        if record is not None and (record.epoch, record.nonce, record.state, record.finish) == repeated:
            self._touch(record)
            return
        record = self._owned(owner)
        if len(record.tokens) < expected_len:
            raise LogBehind(owner.session_id, len(record.tokens), record.log_hash)
        if len(record.tokens) > expected_len or record.log_hash != log_hash:
            raise LogLost(owner.session_id)
        self._end(record, finish)

    async def recreate(self, owner: Ownership, new: NewSession, latest_ms: int) -> None:
        self._must_be_in_time(latest_ms)
        if self._find(owner.session_id) is None:
            if self._was_aborted(owner.session_id):
                raise SessionEnded(owner.session_id)
            self._make(new, owner.epoch, owner.nonce)
        else:
            self._touch(self._owned(owner))

    async def renew(self, owner: Ownership) -> None:
        self._touch(self._owned(owner))

    async def abort(self, session_id: str, principal: str, finish: bytes, latest_ms: int) -> None:
        self._must_be_in_time(latest_ms)
        record = self._of(session_id, principal)
        if record.state == "live":
            self._note_aborted(session_id, "")
        self._end(record, finish if record.state == "live" else record.finish)

    async def delete(self, session_id: str, principal: str, latest_ms: int) -> None:
        self._must_be_in_time(latest_ms)
        if self._find(session_id) is not None:
            self._of(session_id, principal)
        elif not self._was_aborted(session_id) or self._aborted[session_id][1] != principal:
            raise UnknownSession(session_id)
        self._note_aborted(session_id, principal)
        self._records.pop(session_id, None)

    def _note_aborted(self, session_id: str, principal: str) -> None:
        known_s = self._finished_ttl_s + LARGEST_CLOCK_STEP_S
        self._aborted[session_id] = self._clock() + known_s, principal

    def _was_aborted(self, session_id: str) -> bool:
        return self._clock() < self._aborted.get(session_id, (-math.inf, ""))[0]

    async def exchange(self, bucket: TokenBucket, exchange: Exchange) -> Exchanged:
        burst, now_s = bucket.burst, self._clock()
        level, at_s = self._buckets.get(bucket.principal, (burst, now_s))
        level += max(0.0, now_s - at_s) * bucket.per_s
        level = min(burst, min(burst, level) + exchange.returned)
        granted = exchange.needed is not None and level >= min(exchange.needed, burst) - 1e-6
        level -= exchange.needed or 0 if granted else 0
        leased = 0
        if granted or exchange.needed is None:
            leased = max(0, min(exchange.ahead, math.floor(level + 1e-6)))
        self._buckets[bucket.principal] = level - leased, now_s
        return Exchanged(granted, leased, level - leased)

    async def close(self) -> None:
        pass

    def log(self, session_id: str) -> list[int]:
        record = self._find(session_id)
        if record is None:
            raise UnknownSession(session_id)
        return list(record.tokens)

    def roll_back(self, session_id: str, length: int, meta: bytes) -> None:
        record = self._records[session_id]
        del record.tokens[length:]
        record.log_hash = prefix_hash(record.tokens)
        record.meta = meta

    def _copy_of(self, record: _Record, tokens: Sequence[int]) -> _Record:
        """Return a copy with these tokens; `replace` takes five times as long."""
        copy = _Record(*_VALUES(record))
        copy.tokens = list(tokens)
        return copy

    def _find(self, session_id: str) -> _Record | None:
        record = self._records.get(session_id)
        if record is not None and record.expires_s <= self._clock():
            del self._records[session_id]
            return None
        return record

    def _of(self, session_id: str, principal: str) -> _Record:
        record = self._find(session_id)
        if record is None or record.principal != principal:
            raise UnknownSession(session_id)
        return record

    def _owned(self, owner: Ownership) -> _Record:
        record = self._find(owner.session_id)
        if record is None:
            raise UnknownSession(owner.session_id)
        if (record.epoch, record.nonce) != (owner.epoch, owner.nonce):
            raise (ClaimLost if record.epoch < owner.epoch else Fenced)(owner.session_id)
        if record.state == "finished":
            raise SessionEnded(owner.session_id)
        self._must_have_its_prompt(owner.session_id, record)
        return record

    @staticmethod
    def _must_have_its_prompt(session_id: str, record: _Record) -> None:
        if len(record.tokens) < record.prompt_len:
            raise LogLost(session_id)

    def _end(self, record: _Record, finish: bytes) -> None:
        record.state, record.finish = "finished", finish
        self._touch(record)

    def _touch(self, record: _Record) -> None:
        ttl_s = self._ttl_s if record.state == "live" else self._finished_ttl_s
        record.expires_s = self._clock() + ttl_s


def _stored(session_id: str, record: _Record) -> StoredSession:
    if prefix_hash(record.tokens) != record.log_hash:
        raise LogLost(f"the stored session {session_id!r} does not agree with its hash")
    return StoredSession(
        ownership=Ownership(session_id, record.epoch, record.nonce),
        principal=record.principal,
        fields=dict(record.fields),
        prompt_len=record.prompt_len,
        tokens=list(record.tokens),
        meta=record.meta,
        state=record.state,
        finish=record.finish,
        created_ms=record.created_ms,
        claimed_ms=record.claimed_ms,
        body_hash=record.body_hash,
        directory=record.directory,
    )
