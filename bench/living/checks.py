"""Check the tokens of finished sessions: by audits, and by asking again without drafts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from bench.living.sessions import Finished
from galley import AsyncClient, GalleyRpcError
from galley.bench.closed_loop import OFF, GatewayLoop
from galley.client.audit import AuditReport, Verdict


@dataclass(slots=True)
class Audits:
    """Sums over the audited sessions, and the number of sessions of each verdict.

    `other_lengths` counts sessions whose log has another number of tokens than the client got.
    """

    sessions: int = 0
    tokens: int = 0
    differing: int = 0
    other_lengths: int = 0
    deterministic: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def count(self, verdict: str) -> None:
        self.verdicts[verdict] = self.verdicts.get(verdict, 0) + 1

    def add(self, report: AuditReport) -> None:
        self.sessions += 1
        self.tokens += report.compared
        self.differing += report.differing
        self.deterministic += report.deterministic
        self.count(report.verdict.value)

    @property
    def is_clean(self) -> bool:
        return not self.differing and not self.other_lengths and set(self.verdicts) <= {Verdict.SAME.value}


async def audit(
    client: AsyncClient, finished: Sequence[Finished], streams: int, say: Callable[[str], None]
) -> Audits:
    """Audit all sessions, `streams` at a time."""
    audits = Audits()

    async def one(session: Finished) -> None:
        try:
            report = await client.audit(session.session_id)
        except GalleyRpcError as error:
            audits.count("failed")
            audits.problems.append(str(error))
            return
        audits.add(report)
        audits.other_lengths += report.output_tokens != len(session.tokens)
        if audits.sessions % 500 == 0:
            say(f"audited {audits.sessions} of {len(finished)} sessions, {audits.differing} tokens differ")

    await _each(finished, streams, one)
    return audits


async def differing_without_drafts(
    client: AsyncClient, finished: Sequence[Finished], sample: int, streams: int
) -> tuple[int, int]:
    """Ask a sample of the sessions again without drafts; return their number, and how many differ."""
    chosen = random.Random(1).sample(finished, min(sample, len(finished)))
    loop = GatewayLoop(client)
    differing = 0

    async def one(session: Finished) -> None:
        nonlocal differing
        differing += (await session.request.send(loop, OFF)).tokens != session.tokens

    await _each(chosen, streams, one)
    return len(chosen), differing


async def _each(
    finished: Sequence[Finished], streams: int, call: Callable[[Finished], Awaitable[None]]
) -> None:
    waiting = iter(finished)

    async def stream() -> None:
        for session in waiting:
            await call(session)

    async with asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(stream())
