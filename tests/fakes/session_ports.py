"""The ports of a session in memory: a target that confirms one token a request, no draft, a faulty store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from galley.core import names
from galley.core.answer.answer import SessionSpec
from galley.core.errors import Fenced, StoreUnavailable
from galley.core.sampling_params import SamplingParams
from galley.core.session import events as ev
from galley.core.session.events import Replica, ReportResults
from galley.core.store import KvDirectory, LogHashes, Ownership
from services.gateway.clock import SECOND
from services.gateway.telemetry.observer import request_observer
from tests.fakes.store import MemoryStore

MS = 1_000_000
TOKEN = 5
SPEC = SessionSpec("s", (1, 2, 3), SamplingParams(), max_position=6, vocab_size=8)


class ManualClock:
    def __init__(self, now: int = 7 * SECOND) -> None:
        self.now = now

    def now_ns(self) -> int:
        return self.now


class FaultyStore(MemoryStore):
    """Each commit takes `commit_ns`; the first `failures` fail, the others are recorded in `directories`.

    `step_s` is what the test adds to the store's clock.
    """

    def __init__(self, manual: ManualClock | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.commit_ns = 0
        self.failures = 0
        self.is_fenced = False
        self.step_s = 0.0
        self.directories: list[KvDirectory] = []
        self._manual = manual or ManualClock()

    def append(
        self,
        owner: Ownership,
        expected_len: int,
        tokens: Sequence[int],
        meta: bytes,
        hashes: LogHashes,
        directory: KvDirectory,
    ) -> int:
        self._manual.now += self.commit_ns
        if self.failures:
            self.failures -= 1
            raise StoreUnavailable("the session store is unavailable", "it is at 10.0.0.1")
        self.directories.append(directory)
        return super().append(owner, expected_len, tokens, meta, hashes, directory)

    async def renew(self, owner: Ownership) -> None:
        if self.is_fenced:
            raise Fenced(owner.session_id)
        await super().renew(owner)

    def forget(self) -> None:
        self._records.clear()
        self._aborted.clear()


class PortTarget:
    """Confirm one token 5 ms later; verification `fails_at` fails."""

    def __init__(self, clock: ManualClock | None = None, *, moves: bool = False) -> None:
        self.clock = clock or ManualClock()
        self.moves = moves
        self.answered = 0
        self.fails_at: int | None = None
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.has_expired = asyncio.Event()
        self.build: Callable[[int], str] = lambda _: "build-1"
        self.verifications: list[PortVerification] = []
        self.remaining_ns: list[int | None] = []

    def verify(
        self,
        _spec: SessionSpec,
        request: ev.Verify,
        remaining_ns: int | None,
        report: ReportResults,
    ) -> PortVerification:
        self.remaining_ns.append(remaining_ns)
        number = len(self.verifications) if self.moves else 0
        replica = Replica(f"target:{number}", "life")
        self.verifications.append(PortVerification(self, request, replica, report))
        return self.verifications[-1]


class PortVerification:
    def __init__(
        self, target: PortTarget, request: ev.Verify, replica: Replica, report: ReportResults
    ) -> None:
        self.replica = replica
        self.closed = 0
        self._target = target
        self._request = request
        self._report = report
        self._call = request_observer().call(names.VERIFY, replica.address)
        self._answering = asyncio.create_task(self._answer())

    async def _answer(self) -> None:
        target, request = self._target, self._request
        await target.may_answer.wait()
        await asyncio.sleep(0)  # the store, which takes no time, answers first
        if target.answered == target.fails_at:
            self._call.failed("internal")
            self._call.end()
            self._report([ev.Failed(request.request_id, "its logits are not numbers", retryable=False)])
            return
        target.clock.now += 5 * MS
        target.answered += 1
        position = request.slice.start + len(request.slice.tokens)
        timing = ev.Timing(2 * MS, 2 * MS, 1 * MS)
        build = target.build(target.answered)
        self._call.end()
        self._report(
            [ev.Verified(request.request_id, position, (TOKEN,), 0, 0, position, build, timing=timing)]
        )

    def extend(self, request: ev.ExtendVerify) -> None:
        pass

    def expire(self) -> bool:
        self.close()
        self._target.has_expired.set()
        return self._target.moves

    def close(self) -> None:
        self.closed += 1
        self._answering.cancel()
        self._call.end()


class NoDraft:
    replica = None

    async def propose(self, _spec: SessionSpec, request: ev.Propose, _remaining_ns: int | None) -> ev.Failed:
        return ev.Failed(request.request_id, "there is no draft")
