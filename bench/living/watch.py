"""The lines that a run prints while it goes on: cycles of training, changes of versions, figures."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from bench.living.traffic import Figures
from galley.common.registry.trials import DraftVersions
from galley.core.versions.state import VersionEvent
from galley.distill.follow.journal import RECORD
from galley.distill.work import kept_lines

LINE_EVERY_S = 15.0
WINDOW_S = 60.0


class Watched(Protocol):
    """Traffic that knows its figures."""

    @property
    def now_s(self) -> float: ...

    def between(self, from_s: float, to_s: float) -> Mapping[str, Figures]: ...


class Watch:
    def __init__(self, traffic: Watched, versions: DraftVersions, work: Path) -> None:
        self._traffic = traffic
        self._versions = versions
        self._work = work
        self._cycles = 0
        self._epoch = 0

    async def follow(self, sending: asyncio.Task[None], for_s: float, promotions: int) -> None:
        """Print until the time is over, or so many drafts were promoted (0: no bound)."""
        until_s = self._traffic.now_s + for_s
        while (left_s := until_s - self._traffic.now_s) > 0:
            done, _ = await asyncio.wait([sending], timeout=min(LINE_EVERY_S, left_s))
            if done:
                sending.result()
                return
            events = await self.look()
            if promotions and sum(event.kind == "promote" for event in events) >= promotions:
                return

    async def look(self) -> Sequence[VersionEvent]:
        """Print what is new; return all changes of versions, the latest first."""
        events = await self._versions.history()
        self._say_cycles()
        self._say_changes(events)
        self._say_traffic()
        return events

    def say(self, line: str) -> None:
        print(f"{self._traffic.now_s:5.0f} s  {line}", flush=True)

    def _say_cycles(self) -> None:
        cycles = kept_lines(self._work / RECORD)
        for cycle in cycles[self._cycles :]:
            found = cycle["acceptance"]["all"]
            self.say(
                f"cycle {cycle['cycle']}: trained {cycle['version']} for {cycle['training_s']:.0f} s; on "
                f"held-out sessions it accepts {found['new']:.3f} after {found['present']:.3f}: "
                f"{cycle['decision']}"
            )
        self._cycles = len(cycles)

    def _say_changes(self, events: Sequence[VersionEvent]) -> None:
        for event in reversed(events):
            if event.epoch > self._epoch:
                self._epoch = event.epoch
                self.say(f"{event.kind} {event.version} by {event.author}: {event.reason}")

    def _say_traffic(self) -> None:
        now_s = self._traffic.now_s
        parts = [
            f"{name} {of.first:.2f} accepted, {of.drafted_share:.0%} drafted, {of.tokens_per_s:.0f} tokens/s"
            for name, of in self._traffic.between(now_s - WINDOW_S, now_s).items()
            if of.answers
        ]
        self.say("; ".join(parts))


def recorded_cycle(cycle: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a record of a benchmark keeps of a cycle of training."""
    names = ("cycle", "decision", "reason", "answer_tokens_seen", "training_s", "acceptance")
    return {name: cycle[name] for name in names}
