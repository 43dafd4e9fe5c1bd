"""The records of audits as the gateways of a simulation reach them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

from galley.core.audit import AuditCounts, AuditReport
from tests.simulation.ledger import Ledger
from tests.simulation.system.loop import Process
from tests.simulation.system.redis import SimRedis

T = TypeVar("T")


class SimAudits:
    """The parts of `AuditRecords` that are used. Each report is checked where the gateway makes it."""

    def __init__(self, redis: SimRedis, caller: Process, ledger: Ledger) -> None:
        self._redis = redis
        self._caller = caller
        self._ledger = ledger
        self._nonces: defaultdict[str, object] = defaultdict(object)

    async def add(self, report: AuditReport, _now_ms: int) -> None:
        self._ledger.audited(self._caller.name, report)
        await self._call(lambda: None)

    async def counts(self) -> AuditCounts:
        return await self._call(AuditCounts)

    async def wait_ms(self, address: str) -> int:
        return await self._call(lambda: self._redis.turns.wait_ms(address))

    async def begin_turn(self, address: str) -> int:
        nonce = self._nonces[address]
        return await self._call(lambda: self._redis.turns.begin(address, nonce))

    async def end_turn(self, address: str, compute_ns: int) -> None:
        nonce = self._nonces[address]
        await self._call(lambda: self._redis.turns.end(address, nonce, compute_ns))
        self._nonces.pop(address, None)

    async def close(self) -> None:
        """Do nothing: the records hold no connection."""

    async def _call(self, work: Callable[[], T]) -> T:
        return await self._redis.call(self._caller, work, repeats=False)
