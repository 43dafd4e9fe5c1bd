"""The records of audits as the gateways of a simulation reach them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from galley.core.audit import AuditCounts, AuditReport
from services.gateway.audit.records import rest_ms
from tests.simulation.ledger import Ledger
from tests.simulation.system.loop import Process
from tests.simulation.system.redis import SimRedis

T = TypeVar("T")
_TURN_S = 150.0


class SimAudits:
    """The parts of `AuditRecords` that are used. Each report is checked where the gateway makes it."""

    def __init__(self, redis: SimRedis, caller: Process, ledger: Ledger) -> None:
        self._redis = redis
        self._caller = caller
        self._ledger = ledger

    async def add(self, report: AuditReport, _now_ms: int) -> None:
        self._ledger.audited(self._caller.name, report)
        await self._call(lambda: None)

    async def counts(self) -> AuditCounts:
        return await self._call(AuditCounts)

    async def begin_turn(self, address: str) -> int:
        return await self._call(lambda: self._begin(address))

    async def end_turn(self, address: str, compute_ns: int) -> None:
        await self._call(lambda: self._end(address, compute_ns))

    async def close(self) -> None:
        """Do nothing: the records hold no connection."""

    def _begin(self, address: str) -> int:
        now_s = asyncio.get_running_loop().time()
        left_s = self._redis.turns.get(address, 0.0) - now_s
        if left_s > 0:
            return max(1, round(1000 * left_s))
        self._redis.turns[address] = now_s + _TURN_S
        return 0

    def _end(self, address: str, compute_ns: int) -> None:
        self._redis.turns[address] = asyncio.get_running_loop().time() + rest_ms(compute_ns) / 1000

    async def _call(self, work: Callable[[], T]) -> T:
        return await self._redis.call(self._caller, work, repeats=False)
