"""The token budgets of the principals that call this gateway, as leases of those in the store.

A task for each lease returns and charges tokens and leases more, so that calls seldom wait for the store. A
lease that is not used is returned and its task ends. Principals without `tokens_per_s` have no lease.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, field

from galley.common.logs import get_logger
from galley.core.admission.admission import OWN_TOKENS, Principal
from galley.core.admission.budget import IDLE_NS, BudgetLease
from galley.core.errors import GalleyError, Overloaded
from galley.core.session.events import Clock
from galley.core.store import Exchange, SessionStore
from services.gateway.clock import SECOND
from services.gateway.store.session_log import LONGEST_PAUSE_S, retry

_log = get_logger(__name__)


@dataclass(slots=True)
class _Tended:
    lease: BudgetLease
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    settling: asyncio.Lock = field(default_factory=asyncio.Lock)
    task: asyncio.Task[None] | None = None
    calls: int = 0
    """Calls that have tokens of the lease in an exchange, or may get some from one."""


class Budgets:
    def __init__(self, store: SessionStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._tended: dict[str, _Tended] = {}
        self._is_closing = False

    async def reserve(self, principal: Principal, tokens: int, until_ns: int) -> None:
        """Take tokens from the principal's budget. Raise Overloaded or StoreUnavailable."""
        if principal.limits.tokens_per_s is None:
            return
        tended = self._of(principal)
        tended.calls += 1
        try:
            wait_ns = await self._take(tended, tokens, until_ns)
        finally:
            tended.calls -= 1
            tended.changed.set()
        _refuse(principal, tokens, wait_ns)

    def check(self, principal: Principal) -> None:
        """Raise Overloaded if the budget is known to be in debt; ask nobody."""
        tended = self._tended.get(principal.name)
        if tended is not None and principal.limits.tokens_per_s is not None:
            _refuse(principal, 0, tended.lease.known_wait_ns(0, self._clock.now_ns()))

    def add(self, principal: Principal, tokens: int) -> None:
        """Return tokens that were reserved and not used; a negative number is a charge."""
        if principal.limits.tokens_per_s is not None and tokens:
            tended = self._of(principal)
            tended.lease.add(tokens, self._clock.now_ns())
            tended.changed.set()

    async def close(self) -> None:
        """Return all leases; try once."""
        self._is_closing = True
        tasks = [tended.task for tended in self._tended.values() if tended.task is not None]
        for tended in self._tended.values():
            tended.lease.retire()
            tended.changed.set()
        await asyncio.gather(*tasks)

    async def _take(self, tended: _Tended, tokens: int, until_ns: int) -> int:
        """Return 0, or how many nanoseconds the call must wait."""
        now = self._clock.now_ns()
        if tended.lease.try_take(tokens, now):
            return 0
        if wait_ns := tended.lease.known_wait_ns(tokens, now):
            return wait_ns
        return await retry("reserve", lambda: self._request(tended, tokens), until_ns, self._clock)

    async def _request(self, tended: _Tended, tokens: int) -> int:
        lease = tended.lease
        async with tended.settling:  # the store must have what was returned before this call
            exchange = lease.request(tokens)
        pending = asyncio.ensure_future(self._exchange(lease, exchange))
        try:
            return await asyncio.shield(pending)
        except asyncio.CancelledError:  # the store decides nevertheless
            tended.calls += 1
            pending.add_done_callback(lambda done: self._return(tended, tokens, done))
            raise

    def _return(self, tended: _Tended, tokens: int, done: asyncio.Future[int]) -> None:
        if not done.cancelled() and done.exception() is None and done.result() == 0:
            self.add(tended.lease.principal, tokens)
        tended.calls -= 1
        tended.changed.set()

    async def _exchange(self, lease: BudgetLease, exchange: Exchange) -> int:
        try:
            reply = await self._store.exchange(lease.bucket, exchange)
        except BaseException:
            lease.lost(exchange)
            raise
        return lease.apply(exchange, reply, self._clock.now_ns())

    def _of(self, principal: Principal) -> _Tended:
        tended = self._tended.get(principal.name)
        if tended is None:
            tended = self._tended[principal.name] = _Tended(BudgetLease(principal, self._clock.now_ns()))
            # In a context of its own: the task outlives the call that happens to begin it.
            tended.task = asyncio.create_task(self._tend(tended), context=Context())
        tended.lease.principal = principal  # its limits may have changed
        return tended

    async def _tend(self, tended: _Tended) -> None:
        try:
            await self._settle_until_over(tended)
        finally:
            del self._tended[tended.lease.principal.name]

    async def _settle_until_over(self, tended: _Tended) -> None:
        is_failing = False
        while tended.calls or not tended.lease.is_over(self._clock.now_ns()):
            tended.changed.clear()
            try:
                if not await self._settle(tended):
                    await _wait(tended.changed)
                is_failing = False
            except GalleyError as error:
                if not is_failing:
                    _log.warning("token budget not settled", error=str(error))
                is_failing = True
                if self._is_closing:
                    break
                await asyncio.sleep(LONGEST_PAUSE_S)

    async def _settle(self, tended: _Tended) -> bool:
        """Make the exchange that is due; return False if none is."""
        async with tended.settling:
            exchange = tended.lease.due(self._clock.now_ns())
            if exchange is not None:
                await self._exchange(tended.lease, exchange)
        return exchange is not None


async def _wait(changed: asyncio.Event) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(IDLE_NS / SECOND):
            await changed.wait()


def _refuse(principal: Principal, tokens: int, wait_ns: int) -> None:
    if wait_ns:
        rate = f"{principal.limits.tokens_per_s:g} tokens per second"
        what = f"{principal.name} has no token budget left for {tokens} tokens ({rate})"
        raise Overloaded(what, wait_ns / SECOND, OWN_TOKENS)
