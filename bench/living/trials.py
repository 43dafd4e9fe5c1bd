"""Follow the versions of the drafts: keep those that are promoted, and have bad ones tried by hand."""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.living import planted
from bench.living.learner import shipped
from bench.living.sessions import Sessions
from bench.living.watch import Watch
from galley.common.registry.leases import DRAFT_POOL, ReplicaRegistry
from galley.common.registry.trials import DraftVersions
from galley.core.versions.state import NOT_TRIED, VersionEvent
from galley.distill.follow.canaries import AUTHOR as LEARNER

LONGEST_TRIAL_S = 180.0
"""A bad draft that is not decided by then is drained."""
_LONGEST_WAIT_S = 600.0
_POLL_S = 0.25
_PAUSE_S = 2.0
_LONGEST_ABSENCE_S = 20.0
_LOADING_S = 30.0
"""A version that was loaded so recently will be tried."""
_AUTHOR = "proof"


@dataclass(frozen=True, slots=True)
class Promotion:
    """A promotion by rule, and the workloads of the traffic at that time."""

    version: str
    before: str
    at_s: float
    reason: str
    weights: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PlantedTrial:
    """The trial of a bad draft: what ended it, and how long that took, from `try` and from a first session.

    The first session is the first one of the version that was seen to have finished.
    """

    kind: str
    version: str
    phase: str
    at_s: float
    ended_by: str = ""
    reason: str = ""
    seconds: float | None = None
    seconds_of_sessions: float | None = None


@dataclass(slots=True)
class Drafts:
    """The folders of all versions, of which the learner keeps the latest only."""

    work: Path
    kept: Path
    folders: dict[str, Path] = field(default_factory=lambda: {"": shipped()})
    promotions: list[Promotion] = field(default_factory=list)
    _stable: str = ""
    _epoch: int = 0

    @property
    def stable(self) -> Path:
        return self.folders[self._stable]

    async def follow(self, versions: DraftVersions, sessions: Sessions) -> None:
        """Note changes until cancelled."""
        while True:
            await self.update(versions, sessions)
            await asyncio.sleep(_POLL_S)

    async def update(self, versions: DraftVersions, sessions: Sessions) -> None:
        for event in reversed(await versions.history()):
            if event.epoch > self._epoch:
                self._epoch = event.epoch
                self._note(event, sessions)

    def _note(self, event: VersionEvent, sessions: Sessions) -> None:
        trained = self.work / "drafts" / event.version
        if event.version not in self.folders and trained.is_dir():
            self.folders[event.version] = shutil.copytree(trained, self.kept / event.version)
        if event.kind == "promote":
            before, self._stable = self._stable, event.version
            phase = sessions.phase
            self.promotions.append(
                Promotion(event.version, before, sessions.now_s, event.reason, phase.weights)
            )


@dataclass(slots=True)
class Planter:
    """Have bad drafts tried while the traffic runs, as a person would: by `galley drafts`."""

    versions: DraftVersions
    registry: ReplicaRegistry
    store_url: str
    drafts: Drafts
    sessions: Sessions
    watch: Watch
    tokens: int
    trials: list[PlantedTrial] = field(default_factory=list)

    async def run(self, plan: Sequence[tuple[str, float]]) -> None:
        """Plant each kind once its share of the sessions has begun, and wait until it is decided."""
        for number, (kind, share) in enumerate(plan, 1):
            await self.sessions.reach(share)
            version = f"planted-{number}"
            folder = self.drafts.kept / version
            await asyncio.to_thread(planted.plant, kind, self.drafts.stable, folder)
            self.drafts.folders[version] = folder
            self.watch.say(f"plant {version}: {kind}")
            self.trials.append(await self._try(kind, version, folder))

    async def _try(self, kind: str, version: str, folder: Path) -> PlantedTrial:
        trial = PlantedTrial(kind, version, self.sessions.phase.name, self.sessions.now_s)
        problem = "another version is on trial"
        try:
            async with asyncio.timeout(_LONGEST_WAIT_S):
                while problem:
                    await self._wait_for_turn()
                    problem = await self._begin(version, folder)
        except TimeoutError:
            return PlantedTrial(kind, version, trial.phase, trial.at_s, "not tried", problem)
        return await self._decided(kind, version)

    async def _wait_for_turn(self) -> None:
        """Return once no version is on trial, and none was loaded for a trial that is still to begin.

        End the trial of a version that has had no replica for a while: it would stay undecided.
        """
        absent_s = 0.0
        while True:
            state, history = await self.versions.read(), await self.versions.history()
            canary = state.split.canary
            if not canary and not (history and _is_loading(history[0])):
                return
            serving = {lease.version for lease in await self.registry.read(DRAFT_POOL)}
            absent_s = absent_s + _POLL_S if canary and canary not in serving else 0.0
            if absent_s > _LONGEST_ABSENCE_S:
                await self.versions.drain(canary, author=_AUTHOR, reason="no replica")
            await asyncio.sleep(_POLL_S)

    async def _begin(self, version: str, folder: Path) -> str:
        """Load the draft and begin its trial; return why that failed, or nothing."""
        problem = await self._galley("load", str(folder), "--version", version)
        problem = problem or await self._galley(
            "try", version, "--share", "0.5", "--tokens", str(self.tokens), "--reason", "planted"
        )
        if problem:
            self.watch.say(f"{version} is not tried yet: {problem}")
            await asyncio.sleep(_PAUSE_S)
        return problem

    async def _galley(self, *arguments: str) -> str:
        """Run `galley drafts`; return the end of what it printed if it failed."""
        command = [sys.executable, "-P", "-m", "galley.cli", "drafts", *arguments]
        process = await asyncio.create_subprocess_exec(
            *command,
            *("--redis-url", self.store_url),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        return output.decode(errors="replace").strip()[-300:] or "it failed" if process.returncode else ""

    async def _decided(self, kind: str, version: str) -> PlantedTrial:
        first_s: float | None = None
        began_s, phase = self.sessions.now_s, self.sessions.phase.name
        while True:
            counts = (await self.versions.counts([version]))[version]
            if first_s is None and counts.sessions:
                first_s = self.sessions.now_s
            events = [one for one in await self.versions.history() if one.version == version]
            end, start = events[0], next(one for one in events if one.kind == "try")
            if end.epoch > start.epoch:
                seconds = (end.at_ms - start.at_ms) / 1000
                of_sessions = None if first_s is None else self.sessions.now_s - first_s
                return PlantedTrial(
                    kind,
                    version,
                    phase,
                    began_s,
                    f"{end.kind} by {end.author}",
                    end.reason,
                    seconds,
                    of_sessions,
                )
            if self.sessions.now_s - began_s > LONGEST_TRIAL_S:
                await self.versions.drain(version, author=_AUTHOR, reason="undecided")
            await asyncio.sleep(_POLL_S)


def _is_loading(latest: VersionEvent) -> bool:
    """Return True if the latest event is the learner's, which then begins a trial."""
    age_s = time.time() - latest.at_ms / 1000
    return latest.reason == NOT_TRIED and latest.author == LEARNER and age_s < _LOADING_S


async def end_trial(versions: DraftVersions) -> str:
    """End a trial that is in force when the traffic ends; return its version, or nothing."""
    canary = (await versions.read()).split.canary
    if canary:
        await versions.drain(canary, author=_AUTHOR, reason="the traffic has ended")
    return canary
