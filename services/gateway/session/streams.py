"""The open streams of one gateway: admission, claiming, running and draining sessions."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Self, TypeVar

import grpc

from galley.common.logs import get_logger, level_of, log_internal
from galley.common.wire import status
from galley.core.admission.admission import DRAINING, Admission, AdmissionSlot, Principal
from galley.core.answer.answer import (
    Answer,
    Chunk,
    Ending,
    NumericsChanged,
    Reason,
    SessionSpec,
    decode_ending,
    encode_ending,
)
from galley.core.errors import (
    Broken,
    ClientStalled,
    Fenced,
    GalleyError,
    InvalidField,
    LogLost,
    Overloaded,
    Unavailable,
    UnknownSession,
)
from galley.core.session import events as ev
from galley.core.session.draft_statistics import SharedStatistics
from galley.core.session.events import Clock
from galley.core.session.machine import Session, SessionLimits
from galley.core.store import NewSession, OwnerChanged, SessionStore, StoredSession
from services.gateway.client_call import ClientCall, once
from services.gateway.clock import Timeouts
from services.gateway.request.validate import ResumeSpec
from services.gateway.session.budgets import Budgets
from services.gateway.session.own_sources import OwnSources
from services.gateway.session.replay import SPEC_FIELD, Replays
from services.gateway.session.runner import Ports, SessionRunner
from services.gateway.store.redis import NONCE_BYTES
from services.gateway.store.session_log import SessionLog, StoreTime, read_store_time, retry
from services.gateway.telemetry.observer import request_observer

PRIVATE_FIELD = "private"
"""Field of a stored session whose caller wants nothing kept of it."""

_T = TypeVar("_T")
_log = get_logger(__name__)

_LEEWAY_MS = 100
"""Time by which the owner's claim may follow a call that replaces it; clocks are compared less exactly."""
_SESSIONS_AN_AUDIT = 16
"""Streams of a gateway for each audit that clients may have it make at once."""
_OWNER_PAUSE_MS = 2_000
"""An owner that has written nothing for this long may have stopped."""


@dataclass(frozen=True, slots=True)
class LogStatistics:
    """Count the tokens of a logged answer that a draft proposed, and those of the prediction that it has.

    `ending` is None while it goes on.
    """

    ending: Ending | None
    drafted: int
    predicted: int


@dataclass(frozen=True, slots=True)
class PreparedClaim:
    """A session that may be claimed: as it was read at `called_ns`, with at most `left` tokens to come."""

    slot: AdmissionSlot
    resume: ResumeSpec
    stored: StoredSession
    spec: SessionSpec
    left: int
    called_ns: int


class Streams:
    """The open streams. `ports_of` returns the ports of a session; `decode` turns token ids into text."""

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
        self.is_saturated: Callable[[], bool] = lambda: False
        """Tells whether the gateway has more to do than it can: it admits no further streams then."""
        self.on_call: Callable[[], None] = lambda: None
        """Called for each new stream, also one that is refused."""
        self.draft_version_of: Callable[[SessionSpec], str] = lambda _: ""
        """Returns the version of the draft that a session is given; empty: none by name."""
        self.own_sources = OwnSources()
        self.on_finished: list[Callable[[Session, StoredSession, Principal], None]] = []
        """Called for each session whose ending this gateway stored, at once; must neither block nor raise.

        The stored session is the one that this gateway created or claimed, without the output since.
        """
        self._store = store
        self._clock = clock
        self._ports_of = ports_of
        self._replays = Replays(decode)
        self._limits = limits
        self._timeouts = timeouts
        self._admission = Admission(max_sessions)
        self._budgets = Budgets(store, clock)
        self._aborts = Admission(max_sessions, "calls to Abort")
        self._reads = Admission(max_sessions, "reads of sessions")
        self._answers = Admission(max_sessions, "reads of answers")
        self._audits = Admission(max(1, max_sessions // _SESSIONS_AN_AUDIT), "audits")
        self._draining = False
        self.shared = SharedStatistics()
        self._running: set[SessionRunner] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def admit(self, principal: Principal) -> Iterator[AdmissionSlot]:
        """Hold a slot for a stream. Raise Overloaded or Unavailable."""
        self.on_call()
        if self._draining:
            request_observer().rejected(DRAINING)
            raise Unavailable("this gateway is shutting down; send the request to another")
        with _counted_refusals():
            self._budgets.check(principal)
            slot = self._admission.enter(principal, self._clock.now_ns(), is_saturated=self.is_saturated())
        self._idle.clear()
        try:
            yield slot
        finally:
            if not slot.is_kept:
                self._release(slot)

    def most(self, principal: Principal) -> int:
        """Return how many streams the principal can have open at once."""
        return self._admission.most(principal)

    async def reserve(
        self, slots: Sequence[AdmissionSlot], tokens: Sequence[int], deadline_ns: int | None
    ) -> None:
        """Reserve output tokens of a principal's budget, for each of the slots of a call.

        They are reserved at once: a full budget admits them all. Raise Overloaded or StoreUnavailable.
        """
        until_ns = self._timeouts.store_deadline_ns(self._clock.now_ns(), deadline_ns)
        with _counted_refusals():
            await self._budgets.reserve(slots[0].principal, sum(tokens), until_ns)
        for slot, its_tokens in zip(slots, tokens, strict=True):
            slot.reserved += its_tokens

    def charge(self, slot: AdmissionSlot, tokens: int) -> None:
        """Charge the slot's principal for tokens that a call made the gateway read."""
        self._budgets.add(slot.principal, -tokens)

    @property
    def is_draining(self) -> bool:
        return self._draining

    @property
    def held(self) -> int:
        return self._admission.held

    def keep(self, work: asyncio.Task[None], slot: AdmissionSlot, used: Callable[[], int]) -> None:
        """Keep the slot of a session that its client has left until `work` is done; then charge `used()`."""
        slot.is_kept = True

        def done(_: asyncio.Task[None]) -> None:
            slot.used = used()
            self._release(slot)

        work.add_done_callback(done)

    def _release(self, slot: AdmissionSlot) -> None:
        if not slot.is_released:
            self._budgets.add(slot.principal, slot.reserved - (slot.used or 0))
        self._admission.leave(slot, self._clock.now_ns())
        if not self._admission.held:
            self._idle.set()

    async def create(
        self,
        slot: AdmissionSlot,
        spec: SessionSpec,
        body_hash: bytes,
        deadline_ns: int | None,
        stored_fields: Mapping[str, bytes] = MappingProxyType({}),
    ) -> SessionRunner:
        """Return the runner of a stored or joined session. Charge the prompt, or what a joined one replays.

        A new session keeps `stored_fields` beside its request. Raise KeyReused, LogLost, OwnerChanged or
        StoreUnavailable.
        """
        observer = request_observer()
        fields = {SPEC_FIELD: await self._replays.encode(spec), **observer.stored_fields(), **stored_fields}
        new = NewSession(spec.session_id, slot.principal.name, body_hash, fields, spec.prompt)
        nonce = _nonce_of(slot)
        called_ns = self._clock.now_ns()
        until_ns = self._timeouts.store_deadline_ns(called_ns, deadline_ns)

        async def create(time: StoreTime) -> StoredSession:
            return await self._store.create(new, nonce, time.latest_ms(until_ns))

        stored = await self._change("create", spec.session_id, create, until_ns)
        if stored.ownership.nonce == nonce:
            self.charge(slot, len(spec.prompt) + len(spec.prediction))
            answer = await self._replays.begin(spec)
        else:
            stored, answer = await self._take_over(slot, stored, nonce, deadline_ns)
        session = await self._session(stored, answer)
        observer.opened(session, stored, called_ns)
        return self._runner(session, stored, slot.principal, called_ns, deadline_ns)

    async def prepare_claims(
        self, slots: Sequence[AdmissionSlot], resumes: Sequence[ResumeSpec], deadline_ns: int | None
    ) -> list[PreparedClaim]:
        """Read and check the sessions of a call, and reserve what their answers still need, all at once.

        Raise UnknownSession, StoreUnavailable, InvalidField, LogLost if a stored session cannot be read or is
        not the client's, or Overloaded if the token budget does not cover the rest of the answers. All is
        checked before a session is claimed, so a refused call leaves its owner alone. Charge what was read if
        the sessions refuse the call.
        """
        claims = []
        with self._charged_if_refused(slots[0].principal) as read:
            for slot, resume in zip(slots, resumes, strict=True):
                called_ns = self._clock.now_ns()
                stored = await self.read(resume.session_id, slot.principal, deadline_ns)
                read.append(stored)
                spec = await self._replays.spec_of(stored)
                checked = resume.next_index if resume.seen_hash else 0
                output_hash = await self._replays.output_hash(stored, checked)
                left = check_resume(stored, spec, resume, output_hash)
                claims.append(PreparedClaim(slot, resume, stored, spec, left, called_ns))
        await self.reserve(slots, [claim.left for claim in claims], deadline_ns)
        return claims

    async def claim(self, claim: PreparedClaim, deadline_ns: int | None) -> SessionRunner:
        """Take over a session for a client that has output tokens [0, next_index); return its runner.

        Charge the replay. Raise StoreUnavailable, OwnerChanged, or LogLost.
        """
        slot, resume = claim.slot, claim.resume
        nonce = _nonce_of(slot)
        stored, answer = await self._take_over(slot, claim.stored, nonce, deadline_ns, claim.spec)
        session = await self._session(stored, answer, resume.next_index, resume.seen_hash)
        request_observer().opened(session, stored, claim.called_ns, resume.next_index)
        return self._runner(session, stored, slot.principal, claim.called_ns, deadline_ns)

    def admit_read(self, principal: Principal, *, to_end: bool = False) -> AbstractContextManager[None]:
        """Hold a slot for `read`, and for what is made of the session.

        Raise Overloaded, also in debt unless the session is read `to_end` it.
        """
        return self._slot(self._reads, principal, in_debt=to_end)

    def admit_answer(self, principal: Principal, *, to_end: bool = False) -> AbstractContextManager[None]:
        """Hold a slot until the client has a stored answer; slow clients keep nobody from `admit_read`.

        Raise Overloaded as `admit_read` does.
        """
        return self._slot(self._answers, principal, in_debt=to_end)

    def admit_audit(self, principal: Principal) -> AbstractContextManager[None]:
        """Hold a slot for an audit, which has a target compute a session again. Raise Overloaded."""
        return self._slot(self._audits, principal, in_debt=False)

    @contextmanager
    def _slot(self, admission: Admission, principal: Principal, *, in_debt: bool) -> Iterator[None]:
        if not in_debt:
            self._budgets.check(principal)
        slot = admission.enter(principal, self._clock.now_ns())
        try:
            yield
        finally:
            admission.leave(slot, self._clock.now_ns())

    async def read(self, session_id: str, principal: Principal, deadline_ns: int | None) -> StoredSession:
        """Return a session as the store holds it, within `admit_read` or `admit_answer`.

        Raise UnknownSession or StoreUnavailable.
        """
        until_ns = self._timeouts.store_deadline_ns(self._clock.now_ns(), deadline_ns)
        return await retry(
            "read", lambda: self._store.read(session_id, principal.name), until_ns, self._clock
        )

    def charge_read(self, stored: StoredSession, principal: Principal) -> None:
        """Charge the output tokens of a session that was read, but not for `answer_of` or a Resume."""
        self._budgets.add(principal, stored.prompt_len - len(stored.tokens))

    @contextmanager
    def _charged_if_refused(self, principal: Principal) -> Iterator[list[StoredSession]]:
        """Charge the output of the sessions that the block puts into the list, if it raises."""
        read: list[StoredSession] = []
        try:
            yield read
        except GalleyError:
            for stored in read:
                self.charge_read(stored, principal)
            raise

    async def spec_of(self, stored: StoredSession) -> SessionSpec:
        """Return the request of a session that was read. Raise LogLost."""
        return await self._replays.spec_of(stored)

    async def output_hash(self, stored: StoredSession, length: int) -> bytes:
        """Return the content address of the first `length` output tokens of a session that was read."""
        return await self._replays.output_hash(stored, length)

    async def answer_of(
        self, stored: StoredSession, principal: Principal, *, in_debt: bool = False
    ) -> tuple[Answer, Ending | None]:
        """Return the answer of a session that was read, and its end. Charge its replay.

        Raise LogLost, or Overloaded unless a caller may be `in_debt`.
        """
        if in_debt:
            self.charge_read(stored, principal)
        else:
            self._charge_outputs([stored], principal)
        return await self._replays.replay(stored), _ending(stored)

    async def statistics_of(
        self, choices: Sequence[StoredSession], principal: Principal
    ) -> tuple[SessionSpec, list[LogStatistics]]:
        """Return the request of sessions that were read, the choices of one call, and what their logs say.

        Charge their output; raise LogLost or Overloaded.
        """
        self._charge_outputs(choices, principal)
        spec, replays = await self.spec_of(choices[0]), self._replays
        return spec, [
            LogStatistics(
                _ending(one),
                await replays.count_drafted(one),
                await replays.count_predicted(one, spec.prediction),
            )
            for one in choices
        ]

    def _charge_outputs(self, read: Sequence[StoredSession], principal: Principal) -> None:
        """Charge the output tokens that are read again, before they are read. Raise Overloaded."""
        self._budgets.check(principal)
        for stored in read:
            self.charge_read(stored, principal)

    def charge_audit(self, stored: StoredSession, principal: Principal) -> None:
        """Charge the tokens that an audit has a target read. Raise Overloaded."""
        self._budgets.check(principal)
        self._budgets.add(principal, -len(stored.tokens))

    async def abort(self, session_id: str, principal: Principal, deadline_ns: int | None) -> None:
        """End a session for good, here and in the store.

        Raise UnknownSession, StoreUnavailable or Overloaded.
        """
        record = encode_ending(Ending(Reason.ABORTED))
        await self._end(
            "abort", session_id, principal, deadline_ns, partial(self._store.abort, finish=record)
        )

    async def delete(self, session_id: str, principal: Principal, deadline_ns: int | None) -> None:
        """End a session as `abort` does, and remove it from the store."""
        await self._end("delete", session_id, principal, deadline_ns, self._store.delete)

    async def _end(
        self,
        operation: str,
        session_id: str,
        principal: Principal,
        deadline_ns: int | None,
        end: Callable[..., Awaitable[None]],
    ) -> None:
        until_ns = self._timeouts.store_deadline_ns(self._clock.now_ns(), deadline_ns)

        async def change(time: StoreTime) -> None:
            await end(session_id, principal.name, latest_ms=time.latest_ms(until_ns))

        # A slot of its own kind: a principal that has no stream slot left must still be able to end sessions.
        with self._slot(self._aborts, principal, in_debt=True):
            try:
                await self._change(operation, session_id, change, until_ns)
            except (
                UnknownSession
            ):  # a session that the store has lost must not be recreated by its owner here
                if not any(runner.log.new.principal == principal.name for runner in self._of(session_id)):
                    raise
        for runner in self._of(session_id):
            runner.post(ev.Aborted())

    @contextmanager
    def running(self, runner: SessionRunner) -> Iterator[None]:
        """Let Abort and drain reach the runner; fence an older runner of the session here."""
        session_id = runner.session.spec.session_id
        for before in self._of(session_id):
            if before.log.owner.epoch < runner.log.owner.epoch:
                before.post(ev.Interrupted(Fenced(session_id)))
        self._running.add(runner)
        if self._draining:
            runner.post(ev.Draining())
        try:
            yield
        finally:
            self._running.discard(runner)

    def refuse_new(self) -> None:
        self._draining = True

    async def drain(self, hand_over_s: float) -> None:
        """Reject new streams; let the open ones end, or after `hand_over_s` end at a round boundary.

        If cancelled, end the remaining ones at once. Their clients can resume at another gateway.
        """
        self.refuse_new()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(hand_over_s):
                    return await self.wait_idle()
            for runner in self._running:
                runner.post(ev.Draining())
            await self.wait_idle()
        except asyncio.CancelledError:
            for runner in self._running:
                runner.post(ev.Interrupted(Unavailable("this gateway is shutting down; resume at another")))
            raise

    async def wait_idle(self) -> None:
        """Return once no stream is open, and what worked for them has stopped."""
        await self._idle.wait()

    async def close(self) -> None:
        """Return what the gateway holds of token budgets."""
        await self._budgets.close()

    def _of(self, session_id: str) -> list[SessionRunner]:
        return [runner for runner in self._running if runner.session.spec.session_id == session_id]

    async def _session(
        self, stored: StoredSession, answer: Answer, stream_from: int = 0, seen_hash: bytes = b""
    ) -> Session:
        finished = _ending(stored)
        is_over = finished is not None or answer.ending is not None
        return Session(
            answer,
            self._limits,
            stream_from=stream_from,
            seen_hash=seen_hash,
            finished=finished,
            shared=self.shared,
            sources=await self.own_sources.of(answer, stored.principal, is_over=is_over),
            draft_version=self.draft_version_of(answer.spec),
        )

    def _runner(
        self,
        session: Session,
        stored: StoredSession,
        principal: Principal,
        held_ns: int,
        deadline_ns: int | None,
    ) -> SessionRunner:
        """Return the runner of a session that the store held at `held_ns`, or later."""
        log = SessionLog(self._store, stored, self._clock, self._timeouts, held_ns, deadline_ns)
        ports = self._ports_of(stored, session)
        runner = SessionRunner(session, log, ports, self._timeouts, deadline_ns)
        runner.on_finished = partial(self._finished, session, stored, principal)
        return runner

    def _finished(self, session: Session, stored: StoredSession, principal: Principal) -> None:
        for finished in self.on_finished:
            finished(session, stored, principal)

    async def _take_over(
        self,
        slot: AdmissionSlot,
        held: StoredSession,
        nonce: bytes,
        deadline_ns: int | None,
        spec: SessionSpec | None = None,
    ) -> tuple[StoredSession, Answer]:
        """Replay a session, then claim it from the owner that it had when it was read.

        Raise OwnerChanged if that owner claimed it after the slot's call had come, however long that waited
        for its budget: its client may have left this gateway for that owner's, unnoticed. Likewise if the
        owner serves a later call of the same stream: this one has come late.
        """
        former = held.ownership
        if slot.attempt is not None and slot.attempt.precedes(former.nonce):
            raise OwnerChanged(former.session_id)
        self.charge(slot, len(held.tokens) - held.prompt_len)
        answer = await self._replays.replay(held, spec)
        until_ns = self._timeouts.store_deadline_ns(self._clock.now_ns(), deadline_ns)

        async def claim(time: StoreTime) -> StoredSession:
            # A claim in the future shows that the store's clock was set back; it says nothing then.
            if time.at_ms(slot.since_ns) + _LEEWAY_MS < held.claimed_ms <= time.now_ms:
                raise OwnerChanged(former.session_id)
            return await self._store.claim(former, held.principal, nonce, time.latest_ms(until_ns))

        stored = await self._change("claim", former.session_id, claim, until_ns)
        return stored, await self._replays.extend(answer, held, stored)

    async def _change(
        self,
        operation: str,
        session_id: str,
        change: Callable[[StoreTime], Awaitable[_T]],
        until_ns: int,
    ) -> _T:
        """Retry a change that must not happen once it was given up."""

        async def attempt() -> _T:
            return await change(await read_store_time(self._store, session_id, self._clock))

        return await retry(operation, attempt, until_ns, self._clock)


def _nonce_of(slot: AdmissionSlot) -> bytes:
    """Return the nonce of an owner that serves the slot's call."""
    random = secrets.token_bytes(NONCE_BYTES)
    return random if slot.attempt is None else slot.attempt.nonce(random)


@contextmanager
def _counted_refusals() -> Iterator[None]:
    try:
        yield
    except Overloaded as error:
        request_observer().rejected(error.reason)
        raise


def check_resume(stored: StoredSession, spec: SessionSpec, resume: ResumeSpec, output_hash: bytes) -> int:
    """Return how many tokens of the answer are left at most.

    Raise InvalidField, LogLost or Unavailable unless a client can have `next_index` tokens of its hash.
    `output_hash` is that of the first `next_index` output tokens in the log.

    A live session may hold fewer: a store that has lost its latest writes gets them again, from the owner,
    or if that writes nothing any more, from a new one.
    """
    next_index, output_len = resume.next_index, len(stored.tokens) - stored.prompt_len
    longest = spec.max_position - stored.prompt_len
    if next_index > longest:
        raise InvalidField("next_index", f"must be <= {longest} (most output tokens), got {next_index}")
    if next_index > output_len:
        if stored.state == "finished":
            raise LogLost(f"the client has {next_index} tokens, the log only {output_len}")
        if 0 <= stored.idle_ms < _OWNER_PAUSE_MS:
            raise Unavailable(
                f"next_index: must be <= {output_len} (tokens in the log) while another call writes the "
                f"log, got {next_index}; resume again"
            )
    elif resume.seen_hash and output_hash != resume.seen_hash:
        raise LogLost("the answer is not the one whose first tokens the client has seen")
    return longest - output_len if stored.state == "live" else 0


def _ending(stored: StoredSession) -> Ending | None:
    if stored.state != "finished":
        return None
    try:
        return decode_ending(stored.finish)
    except (ValueError, KeyError, TypeError) as error:
        raise LogLost("the ending of the stored session cannot be read") from error


class AnswerStream:
    """The answer of a session for one reader; leave it by `with`. `ending` is set once it is exhausted.

    Take an item once the transport has accepted the item before. Iteration raises the error that the stream
    ends with.

    The session runs in a task of its own, while the call's handler reads its outbox. The transport takes no
    item while the item before is unread. If that lasts for the client's time limit, the session stops, the
    call ends and its slot is released; its status waits in gRPC for the client. Once the client has left, the
    session stops, or continues to its end without a reader.
    """

    def __init__(
        self,
        runner: SessionRunner,
        call: ClientCall,
        streams: Streams,
        slot: AdmissionSlot,
    ) -> None:
        self.ending: Ending | None = None
        self._runner = runner
        self._call = call
        self._streams = streams
        self._slot = slot
        self._output_before = runner.session.answer.output_len
        self._has_left = False
        self._handler = asyncio.current_task()
        self._observer = request_observer()
        self._observer.hold()
        self._task: asyncio.Task[None] | None = asyncio.create_task(self._run())
        self._task.add_done_callback(self._stopped)
        self._unread_end: asyncio.Task[None] | None = None
        # gRPC may drop the generator when the client leaves, but it always reports the end of the call.
        call.add_done_callback(once(self._call_ended))

    @property
    def session(self) -> Session:
        return self._runner.session

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk | NumericsChanged:
        item = await self._runner.outbox.next()
        self._observer.sending(item)
        if not isinstance(item, ev.End):
            return item
        if item.ending is None:
            raise item.error or Broken("a stream ended without a reason")
        self.ending = item.ending
        raise StopAsyncIteration

    def leave(self) -> None:
        """Note that the client no longer reads. The session keeps the slot until it has stopped or ended."""
        if self._has_left:
            return
        self._has_left = True
        self._slot.used = self._used()
        if self._task is None or self._task.done():
            return
        self._streams.keep(self._task, self._slot, self._used)
        if self._runner.session.spec.continue_without_client:
            self._runner.outbox.discard()
        else:
            self._task.cancel()

    def _used(self) -> int:
        return self._runner.session.answer.output_len - self._output_before

    def _stopped(self, _: asyncio.Task[None]) -> None:
        self._task = None  # a task that was cancelled keeps its frames, and so this object
        self._observer.release()

    def stop_watching(self) -> None:
        """Let the caller see to it that the client reads the rest. Call it once the answer is exhausted."""
        if self._unread_end is not None:
            self._unread_end.cancel()
            self._unread_end = None  # it keeps its frames, too

    def _call_ended(self, ctx: object, /) -> None:  # noqa: ARG002  # the signature that grpc calls
        self.leave()
        self.stop_watching()

    async def _run(self) -> None:
        with self._streams.running(self._runner):
            try:
                end = await self._runner.run()
            except Exception as raised:  # noqa: BLE001  # whatever it is, the client must not wait for ever
                _log.error("session failed", exc_info=raised)
                fault = Broken(f"the session runner raised {type(raised).__name__}")
                end = ev.End(error=raised if isinstance(raised, GalleyError) else fault)
        if self._has_left:
            level, error = level_of(end.error), end.error and str(end.error)
            _log.log(level, "session finished after its client left", error=error)
            return
        self._runner.outbox.end(end)
        self._unread_end = asyncio.create_task(self._end_if_unread(end))

    async def _end_if_unread(self, end: ev.End) -> None:
        """End the call if its client does not read the end, with the status that the end would have had."""
        if not isinstance(end.error, ClientStalled):
            await self._runner.outbox.left_unread()
        error = end.error or self._runner.outbox.stalled_error()
        log_internal(error)
        self._observer.failed(error)
        if self._handler is not None:
            self._handler.cancel()
        with suppress(grpc.aio.AbortError, grpc.aio.UsageError, grpc.aio.InternalError):
            await status.abort(self._call, error)
