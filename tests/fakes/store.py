"""`SessionStore` in memory with the exact behaviour of `services.gateway.store.redis`, for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from galley.core.errors import Fenced, KeyReused, LogLost, UnknownSession
from galley.core.store import (
    FINISHED_TTL_S,
    LARGEST_CLOCK_STEP_S,
    SESSION_TTL_S,
    UNCHANGED,
    ClaimLost,
    KvDirectory,
    LogBehind,
    NewSession,
    Ownership,
    SessionEnded,
    SessionStore,
    State,
    StoredSession,
)


@dataclass(slots=True)
class _Record:
    principal: str
    body_hash: bytes
    fields: Mapping[str, bytes]
    prompt_len: int
    tokens: list[int]
    expires_s: float
    created_ms: int
    epoch: int = 1
    nonce: bytes = b""
    meta: bytes = b""
    state: State = "live"
    finish: bytes = b""
    directory: KvDirectory = field(default_factory=KvDirectory)


class MemoryStore(SessionStore):
    """The session store in memory, shared by several gateways; `clock` is in seconds."""

    def __init__(
        self,
        ttl_s: float = SESSION_TTL_S,
        finished_ttl_s: float = FINISHED_TTL_S,
        *,
        clock: Callable[[], float] = lambda: 0.0,
        new_nonce: Callable[[], bytes] | None = None,
    ) -> None:
        self._ttl_s = ttl_s
        self._finished_ttl_s = finished_ttl_s
        self._clock = clock
        self._new_nonce = new_nonce or self._counted_nonce
        self._nonces = 0
        self._records: dict[str, _Record] = {}
        # The nonce of the owner whose session was aborted, and until when it is known.
        self._aborted: dict[str, tuple[bytes, float]] = {}

    def _counted_nonce(self) -> bytes:
        self._nonces += 1
        return self._nonces.to_bytes(16, "little")

    async def ping(self) -> None:
        """Return at once."""

    async def create(self, new: NewSession, nonce: bytes | None = None) -> StoredSession:
        if not new.prompt or not new.body_hash:
            raise ValueError("prompt and body_hash: must not be empty")
        nonce = nonce or self._new_nonce()
        record = self._find(new.session_id)
        if record is None:
            return _stored(new.session_id, self._make(new, 1, nonce))
        if record.principal != new.principal or record.body_hash != new.body_hash:
            raise KeyReused
        return self._own(new.session_id, record, nonce)

    def _make(self, new: NewSession, epoch: int, nonce: bytes) -> _Record:
        record = self._records[new.session_id] = _Record(
            new.principal,
            new.body_hash,
            dict(new.fields),
            len(new.prompt),
            list(new.prompt),
            self._clock() + self._ttl_s,
            int(self._clock() * 1000),
            epoch,
            nonce,
        )
        return record

    async def claim(self, session_id: str, principal: str, nonce: bytes | None = None) -> StoredSession:
        record = self._of(session_id, principal)
        return self._own(session_id, record, nonce or self._new_nonce())

    async def commit(
        self,
        owner: Ownership,
        expected_len: int,
        tokens: Sequence[int],
        meta: bytes,
        directory: KvDirectory = UNCHANGED,
    ) -> int:
        record = self._owned(owner)
        have = len(record.tokens)
        if have < expected_len:
            raise LogBehind(owner.session_id, have)
        if have > expected_len:
            there = record.tokens[expected_len : expected_len + len(tokens)]
            if there != list(tokens[: len(there)]):
                raise LogLost(owner.session_id)
            if len(there) < len(tokens):
                raise LogBehind(owner.session_id, have)
        else:
            record.tokens += tokens
            record.meta += meta
        record.directory = KvDirectory(
            directory.draft or record.directory.draft, directory.target or record.directory.target
        )
        self._touch(record)
        return len(record.tokens)

    async def finish(self, owner: Ownership, expected_len: int, finish: bytes) -> None:
        record = self._find(owner.session_id)
        repeated = (owner.epoch, owner.nonce, "finished", finish)
        if record is not None and (record.epoch, record.nonce, record.state, record.finish) == repeated:
            self._touch(record)
            return
        record = self._owned(owner)
        if len(record.tokens) < expected_len:
            raise LogBehind(owner.session_id, len(record.tokens))
        if len(record.tokens) > expected_len:
            raise LogLost(owner.session_id)
        self._end(record, finish)

    async def recreate(self, owner: Ownership, new: NewSession) -> None:
        if self._find(owner.session_id) is None:
            nonce, until_s = self._aborted.get(owner.session_id, (b"", 0.0))
            if nonce == owner.nonce and self._clock() < until_s:
                raise SessionEnded(owner.session_id)
            self._make(new, owner.epoch, owner.nonce)
        else:
            self._touch(self._owned(owner))

    async def renew(self, owner: Ownership) -> None:
        self._touch(self._owned(owner))

    async def abort(self, session_id: str, principal: str, finish: bytes) -> None:
        record = self._of(session_id, principal)
        if record.state == "live":
            known_s = self._finished_ttl_s + LARGEST_CLOCK_STEP_S
            self._aborted[session_id] = record.nonce, self._clock() + known_s
        self._end(record, finish if record.state == "live" else record.finish)

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
        record.meta = meta

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
        return record

    def _own(self, session_id: str, record: _Record, nonce: bytes) -> StoredSession:
        if record.nonce != nonce:
            record.epoch += 1
            record.nonce = nonce
        self._touch(record)
        return _stored(session_id, record)

    def _end(self, record: _Record, finish: bytes) -> None:
        record.state, record.finish = "finished", finish
        self._touch(record)

    def _touch(self, record: _Record) -> None:
        ttl_s = self._ttl_s if record.state == "live" else self._finished_ttl_s
        record.expires_s = self._clock() + ttl_s


def _stored(session_id: str, record: _Record) -> StoredSession:
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
        body_hash=record.body_hash,
        directory=record.directory,
    )
