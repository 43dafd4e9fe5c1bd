"""The token log of one session as its owner writes it: each change is retried until the store responds.

A store that comes back without its latest writes, or empty, may not hold a session that is served here. The
owner has all of it. It recreates the session with the prompt alone, with its own epoch and nonce; the next
change then reports how much of the log is missing (`LogBehind`), and the machine commits that again.

Two rules keep that safe. A session is recreated only where there is none: an owner that created or claimed
the session since is found there, and this owner is fenced. And it is recreated only if the store held it so
recently that it cannot have expired since, live or finished: a session that was ended elsewhere and has
expired is not recreated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from galley.common.logs import get_logger
from galley.core.answer.answer import encode_ending
from galley.core.errors import Broken, GalleyError, StoreUnavailable, UnknownSession
from galley.core.records import encode_records
from galley.core.session import events as ev
from galley.core.session.events import Clock
from galley.core.store import KvDirectory, LogBehind, SessionStore, StoredSession
from services.gateway.clock import MILLISECOND, SECOND, Timeouts
from services.gateway.telemetry.observer import request_observer
from services.gateway.telemetry.spans import COMMIT, RENEW

_NO_RESPONSE = "the session store does not respond"

_T = TypeVar("_T")
_E = TypeVar("_E")
_log = get_logger(__name__)

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.2
LAST_CALL_S = 0.5
"""Time that a call that started in time may take beyond the limit."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A first attempt at `requested_ns` that failed; no other starts after `until_ns`."""

    error: GalleyError
    requested_ns: int
    until_ns: int


@dataclass(slots=True)
class _Commit:
    """A commit in progress; `attempt` is the first, and `length` that of the log after it."""

    append: Callable[[], Awaitable[int]]
    attempt: asyncio.Future[int]
    report: Callable[[ev.Committed | ev.StoreFailed], None]
    length: int
    requested_ns: int


class SessionLog:
    """The log of one session, for one owner. Each change returns its event for the session machine."""

    def __init__(
        self,
        store: SessionStore,
        stored: StoredSession,
        clock: Clock,
        timeouts: Timeouts,
        held_ns: int,
        deadline_ns: int | None = None,
    ) -> None:
        """Take over a session that the store held at `held_ns`; `deadline_ns` is the call's, or None."""
        self.owner = stored.ownership
        self.new = stored.to_new_session()
        self._store = store
        self._clock = clock
        self._timeouts = timeouts
        self._held_ns = held_ns
        self._deadline_ns = deadline_ns
        self._observer = request_observer()
        self._pending: _Commit | None = None
        self._repeating: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def commit(
        self,
        effect: ev.Commit,
        directory: KvDirectory,
        report: Callable[[ev.Committed | ev.StoreFailed], None],
    ) -> None:
        """Append tokens; `directory` names the replicas that cache the session. One commit at a time.

        `report` gets the outcome in a later turn of the event loop. If the first attempt succeeds, that takes
        no task.
        """
        meta, now_ns = encode_records(effect.records), self._clock.now_ns()
        before = effect.expected_len
        append = partial(
            self._store.commit, self.owner, before, effect.tokens, meta, effect.hashes, directory
        )
        attempt = asyncio.ensure_future(append())
        self._pending = _Commit(append, attempt, report, before + len(effect.tokens), now_ns)
        attempt.add_done_callback(self._attempted)
        if self._timer is None:
            self._watch(self._pending)

    def _attempted(self, attempt: asyncio.Future[int]) -> None:
        """Take the outcome of a commit's first attempt; repeat it where another attempt may succeed."""
        commit = self._pending
        if commit is None or attempt is not commit.attempt:
            return
        error = StoreUnavailable(_NO_RESPONSE) if attempt.cancelled() else attempt.exception()
        if error is None or isinstance(error, LogBehind):
            self._held_ns = commit.requested_ns
        if error is None:
            self._end(commit, ev.Committed(attempt.result()))
        elif isinstance(error, StoreUnavailable | UnknownSession):
            self._repeating = asyncio.create_task(self._repeat(commit, error))
        else:
            self._end(commit, ev.StoreFailed(_as_galley_error(error)))

    async def _repeat(self, commit: _Commit, error: StoreUnavailable | UnknownSession) -> None:
        event: ev.Committed | ev.StoreFailed
        try:
            until_ns = self._until_ns(commit.requested_ns)
            failed = Failed(error, commit.requested_ns, until_ns)
            event = await self._write(COMMIT, commit.append, ev.Committed, failed)
        except Exception as raised:  # noqa: BLE001  # the session must not wait for ever
            event = ev.StoreFailed(_as_galley_error(raised))
        self._end(commit, event, was_repeated=True)

    def _end(
        self, commit: _Commit, event: ev.Committed | ev.StoreFailed, *, was_repeated: bool = False
    ) -> None:
        error = event.error if isinstance(event, ev.StoreFailed) else None
        took_ns = self._clock.now_ns() - commit.requested_ns
        if not was_repeated:
            self._observer.store_called(COMMIT, took_ns, error)
        self._observer.committed(commit.length, took_ns, error)
        self._pending = None
        commit.report(event)

    def _watch(self, commit: _Commit) -> None:
        left_s = _left_s(self._until_ns(commit.requested_ns), self._clock) + LAST_CALL_S
        self._timer = asyncio.get_running_loop().call_later(left_s, self._check)

    def _check(self) -> None:
        """Give up a first attempt that does not end; one timer serves all commits meanwhile."""
        commit, self._timer = self._pending, None
        if commit is None or commit.attempt.done():
            return
        if self._clock.now_ns() < self._until_ns(commit.requested_ns) + int(LAST_CALL_S * SECOND):
            self._watch(commit)
            return
        commit.attempt.cancel()
        self._end(commit, ev.StoreFailed(StoreUnavailable(_NO_RESPONSE)))

    async def close(self) -> None:
        """Report nothing any more. A commit that was sent may still be executed."""
        commit, self._pending = self._pending, None
        if self._timer is not None:
            self._timer.cancel()
        if commit is not None:
            commit.attempt.cancel()
        if self._repeating is not None:
            self._repeating.cancel()
            await asyncio.wait([self._repeating])

    async def finish(self, effect: ev.StoreFinish) -> ev.FinishStored | ev.StoreFailed:
        record = encode_ending(effect.ending)
        return await self._write(
            "finish",
            lambda: self._store.finish(self.owner, effect.log_len, record, effect.log_hash),
            lambda _: ev.FinishStored(),
        )

    async def keep_alive(self) -> ev.StoreFailed:
        """Renew the session, however slow its client is, until that fails; return the failure."""
        while True:
            await asyncio.sleep(self._timeouts.renew_ns / SECOND)
            failed = await self.renew()
            if failed is not None:
                return failed

    async def renew(self) -> ev.StoreFailed | None:
        return await self._write(RENEW, lambda: self._store.renew(self.owner), lambda _: None)

    async def _write(
        self,
        operation: str,
        change: Callable[[], Awaitable[_T]],
        event: Callable[[_T], _E],
        before: Failed | None = None,
    ) -> _E | ev.StoreFailed:
        until_ns = self._until_ns(self._clock.now_ns()) if before is None else before.until_ns
        try:
            return event(
                await retry(operation, lambda: self._attempt(change, until_ns), until_ns, self._clock, before)
            )
        except GalleyError as error:
            return ev.StoreFailed(error)

    def _until_ns(self, now_ns: int) -> int:
        return self._timeouts.store_deadline_ns(now_ns, self._deadline_ns)

    async def _attempt(self, change: Callable[[], Awaitable[_T]], until_ns: int) -> _T:
        """Try a change once; recreate the session first if the store has lost it."""
        # The response shows that the store held the session at the time of the request, or later.
        requested_ns = self._clock.now_ns()
        try:
            result = await change()
        except LogBehind:
            self._held_ns = requested_ns
            raise
        except UnknownSession:
            if requested_ns - self._held_ns > self._timeouts.trusted_ns:
                raise
            time = await read_store_time(self._store, self.owner.session_id, self._clock)
            await self._store.recreate(self.owner, self.new, time.latest_ms(until_ns))
            _log.warning("session recreated", session_id=self.owner.session_id)
            result = await change()
        self._held_ns = requested_ns
        return result


@dataclass(frozen=True, slots=True)
class StoreTime:
    """A reading of the store's clock, with the gateway's times of the request and of the response."""

    now_ms: int
    requested_ns: int
    received_ns: int

    def at_ms(self, time_ns: int) -> int:
        """Return the store's time at `time_ns` of the gateway's clock, or a slightly earlier one."""
        return self.now_ms + (time_ns - self.received_ns) // MILLISECOND

    def latest_ms(self, until_ns: int) -> int:
        """Return when a caller that retries until `until_ns` has given up, on the store's clock."""
        return self.at_ms(max(self.requested_ns, until_ns) + int(LAST_CALL_S * SECOND))


async def read_store_time(store: SessionStore, session_id: str, clock: Clock) -> StoreTime:
    requested_ns = clock.now_ns()
    now_ms = await store.now_ms(session_id)
    return StoreTime(now_ms, requested_ns, clock.now_ns())


async def retry(
    operation: str,
    call: Callable[[], Awaitable[_T]],
    until_ns: int,
    clock: Clock,
    before: Failed | None = None,
) -> _T:
    """Return the result of `call`, repeated until it does not raise StoreUnavailable.

    No attempt starts after `until_ns`. The pause doubles from FIRST_PAUSE_S to LONGEST_PAUSE_S. Raise the
    last StoreUnavailable, or one for the time-out. `before` is an attempt that was made already.
    """
    observer, pause_s = request_observer(), FIRST_PAUSE_S
    started_ns, error = clock.now_ns(), None
    if before is not None:
        started_ns, error = before.requested_ns, before.error
    with observer.store_call(operation, clock.now_ns() - started_ns) as span:
        try:
            async with asyncio.timeout(_left_s(until_ns, clock) + LAST_CALL_S):
                while True:
                    if isinstance(error, StoreUnavailable):
                        left_s = _left_s(until_ns, clock)
                        if left_s <= 0:
                            raise error
                        observer.store_retried(span, error)
                        await asyncio.sleep(min(pause_s, left_s))
                        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                    try:
                        return await call()
                    except StoreUnavailable as raised:
                        error = raised
        except TimeoutError as raised:
            raise StoreUnavailable(_NO_RESPONSE) from raised


def _left_s(until_ns: int, clock: Clock) -> float:
    return max(0, until_ns - clock.now_ns()) / SECOND


def _as_galley_error(error: BaseException) -> GalleyError:
    if isinstance(error, GalleyError):
        return error
    _log.error("commit failed", exc_info=error)
    return Broken(f"the session store raised {type(error).__name__}")
