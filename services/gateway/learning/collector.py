"""Collect finished sessions for the training of drafts, off the path of the sessions.

A collector that cannot keep up, or whose Redis is away, drops sessions.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass

from galley.common.logs import get_logger
from galley.common.registry.spool import LearningSpool, SpooledSession
from galley.core.admission.admission import Principal
from galley.core.answer.answer import Answer
from galley.core.errors import GalleyError
from galley.core.session.machine import Session
from galley.core.store import StoredSession
from services.gateway.session.streams import PRIVATE_FIELD

_MOST_WAITING = 256
_MOST_SESSION_TOKENS = 32_768
"""Encoding that many takes about 1 ms."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Waiting:
    principal: Principal
    answer: Answer
    ended_s: float


class Collector:
    """Keep the newest `most_tokens` tokens of finished sessions for each principal that allows it."""

    def __init__(
        self,
        spool: LearningSpool,
        most_tokens: int,
        present: Callable[[Principal], Awaitable[Principal]],
    ) -> None:
        """`present` returns a principal as it is now: its call may have begun long ago."""
        self.on_collected: Callable[[bool], None] = lambda _: None
        """Called for each session of a principal that allows it, with False for one that was dropped."""
        self._spool = spool
        self._most_tokens = min(most_tokens, _MOST_SESSION_TOKENS)
        self._kept_tokens = most_tokens
        self._present = present
        self._waiting: deque[_Waiting] = deque()
        self._task: asyncio.Task[None] | None = None
        self._is_away = False

    def finished(self, session: Session, stored: StoredSession, principal: Principal) -> None:
        """Note a session that has ended. An adapter's answers are not the model's: they are left out."""
        answer = session.answer
        if not principal.learns or PRIVATE_FIELD in stored.fields or answer.spec.lora:
            return
        if len(answer.tokens) > self._most_tokens:
            return
        if len(self._waiting) >= _MOST_WAITING:
            self._waiting.popleft()
            self.on_collected(False)
        self._waiting.append(_Waiting(principal, answer, asyncio.get_running_loop().time()))
        if self._task is None or self._task.done():
            # In a context of its own: the task outlives the call that happens to begin it.
            self._task = asyncio.create_task(self._work(), context=Context())

    async def remove(self, session_id: str, principal: Principal, *, is_recent: bool) -> None:
        """Remove a session that its principal deletes. Raise StoreUnavailable: the call can be repeated."""
        await self._spool.remove(principal.name, session_id, is_recent=is_recent)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._spool.close()

    async def _work(self) -> None:
        while self._waiting:
            waiting = self._waiting.popleft()
            if not (await self._present(waiting.principal)).learns:
                continue
            self.on_collected(await self._add(waiting))

    async def _add(self, waiting: _Waiting) -> bool:
        spec = waiting.answer.spec
        session = SpooledSession(
            spec.session_id,
            spec.workload,
            spec.sampling.temperature,
            len(spec.prompt),
            waiting.answer.tokens,
        )
        name, ended_s = waiting.principal.name, waiting.ended_s
        try:
            is_added = await self._spool.add(name, session, self._kept_tokens, ended_s=ended_s)
        except Exception as error:  # noqa: BLE001  # the next session may be added
            if not self._is_away:
                unexpected = None if isinstance(error, GalleyError) else error
                _log.warning("sessions not collected for learning", error=str(error), exc_info=unexpected)
            self._is_away = True
            return False
        self._is_away = False
        return is_added
