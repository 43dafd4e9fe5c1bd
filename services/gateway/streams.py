"""The open streams of one gateway: admission, claiming, running and draining sessions."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from services.core import events as ev
from services.core.answer import Answer, Ending, Reason
from services.core.errors import InvalidField, LogLost, Overloaded, Unavailable
from services.core.finish import decode_ending, encode_ending
from services.core.records import decode_records
from services.core.session import Session, SessionLimits
from services.core.spec_codec import decode_spec, encode_spec
from services.core.speculation import Book
from services.core.store import NewSession
from services.gateway.patience import Timeouts, patiently
from services.gateway.runner import SessionRunner
from services.gateway.store import NONCE_BYTES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from services.core.answer import SessionSpec
    from services.core.ports import Clock
    from services.core.store import SessionStore, StoredSession
    from services.gateway.runner import Ports

_T = TypeVar("_T")

SPEC_FIELD = "spec"
_RETRY_AFTER_S = 1.0


class Streams:
    """What a gateway has open. `ports_of` gives a session its own; `decode` turns token ids into text."""

    def __init__(
        self,
        store: SessionStore,
        clock: Clock,
        ports_of: Callable[[StoredSession, Session], Ports],
        decode: Callable[[Sequence[int]], str],
        limits: SessionLimits,
        timeouts: Timeouts,
        max_sessions: int,
    ) -> None:
        self._store = store
        self._clock = clock
        self._ports_of = ports_of
        self._decode = decode
        self._limits = limits
        self._timeouts = timeouts
        self._max_sessions = max_sessions
        self._admitted = 0
        self._draining = False
        self._book = Book()
        self._running: dict[str, SessionRunner] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Hold a place for one stream. Raises Overloaded or Unavailable, before any work is done."""
        if self._draining:
            raise Unavailable("this gateway is shutting down; ask another")
        if self._admitted >= self._max_sessions:
            raise Overloaded(f"all {self._max_sessions} streams of this gateway are in use", _RETRY_AFTER_S)
        self._admitted += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._release()

    def keep(self, work: asyncio.Task[None]) -> None:
        """A session goes on without its client: it holds a place as a stream does until `work` is done."""
        self._admitted += 1
        self._idle.clear()
        work.add_done_callback(lambda _: self._release())

    def _release(self) -> None:
        self._admitted -= 1
        if not self._admitted:
            self._idle.set()

    async def create(
        self, spec: SessionSpec, principal: str, body_hash: bytes, deadline_ns: int | None
    ) -> SessionRunner:
        """Store a new session, or join the one of its id and body. Raises KeyReused, StoreUnavailable."""
        new = NewSession(spec.session_id, principal, body_hash, {SPEC_FIELD: encode_spec(spec)}, spec.prompt)
        nonce = secrets.token_bytes(NONCE_BYTES)
        stored = await self._store_call(lambda: self._store.create(new, nonce), deadline_ns)
        return self._runner(self._session(stored), stored, deadline_ns)

    async def claim(
        self, session_id: str, principal: str, next_index: int, seen_hash: bytes, deadline_ns: int | None
    ) -> SessionRunner:
        """Take over a session for a client that has output tokens [0, next_index).

        Raises UnknownSession, StoreUnavailable, InvalidField, or LogLost if what is stored cannot be read.
        """
        nonce = secrets.token_bytes(NONCE_BYTES)
        stored = await self._store_call(lambda: self._store.claim(session_id, principal, nonce), deadline_ns)
        session = self._session(stored, next_index, seen_hash)
        longest = session.spec.max_position - stored.prompt_len
        if next_index > longest:
            raise InvalidField("next_index", f"must be <= the {longest} tokens that the answer may have")
        return self._runner(session, stored, deadline_ns)

    async def abort(self, session_id: str, principal: str, deadline_ns: int | None) -> None:
        """End a session for good, here and in the store. Raises UnknownSession, StoreUnavailable."""
        record = encode_ending(Ending(Reason.ABORTED))
        await self._store_call(lambda: self._store.abort(session_id, principal, record), deadline_ns)
        runner = self._running.get(session_id)
        if runner is not None:
            runner.tell(ev.Aborted())

    @contextmanager
    def running(self, runner: SessionRunner) -> Iterator[None]:
        """Within, Abort and drain reach the runner."""
        session_id = runner.session.spec.session_id
        self._running[session_id] = runner
        if self._draining:
            runner.tell(ev.Draining())
        try:
            yield
        finally:
            if self._running.get(session_id) is runner:
                del self._running[session_id]

    def refuse_new(self) -> None:
        """From now on no stream is admitted."""
        self._draining = True

    async def wait_idle(self) -> None:
        """Return once no stream is open."""
        await self._idle.wait()

    def hand_over(self) -> None:
        """Have every stream end at its next round boundary, resumable."""
        for runner in self._running.values():
            runner.tell(ev.Draining())

    def cut_off(self) -> None:
        """End every stream at once, wherever it stands; resumable, for nothing of it is here alone."""
        for runner in self._running.values():
            runner.tell(ev.Interrupted(Unavailable("this gateway is shutting down; resume at another")))

    def _session(self, stored: StoredSession, stream_from: int = 0, seen_hash: bytes = b"") -> Session:
        answer = self._answer(stored)
        finished = decode_ending(stored.finish) if stored.state == "finished" else None
        return Session(
            answer,
            self._limits,
            stream_from=stream_from,
            seen_hash=seen_hash,
            finished=finished,
            book=self._book,
        )

    def _answer(self, stored: StoredSession) -> Answer:
        """The answer as its log tells it."""
        prompt = tuple(stored.tokens[: stored.prompt_len])
        output = stored.tokens[stored.prompt_len :]
        try:
            answer = Answer(decode_spec(stored.fields[SPEC_FIELD], prompt), self._decode)
            for token, record in zip(output, decode_records(stored.meta), strict=True):
                answer.absorb(token, record)
        except (ValueError, KeyError, TypeError) as error:
            raise LogLost("what is stored of this session cannot be read") from error
        return answer

    def _runner(self, session: Session, stored: StoredSession, deadline_ns: int | None) -> SessionRunner:
        ports = self._ports_of(stored, session)
        return SessionRunner(session, stored.ownership, ports, self._timeouts, deadline_ns)

    async def _store_call(self, call: Callable[[], Awaitable[_T]], deadline_ns: int | None) -> _T:
        clock = self._clock
        return await patiently(call, self._timeouts.store_deadline_ns(clock.now_ns(), deadline_ns), clock)
