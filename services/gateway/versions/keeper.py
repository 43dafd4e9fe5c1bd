"""Keep the gateway's split of sessions between versions of drafts: read it, count sessions, apply the rule.

All gateways read the state of their deployment in Redis, about once a second. While a version is on trial,
each adds the counts of the sessions that ended there, and applies the rule to the sums of all. The state
changes by compare-and-set, so one of them decides. While Redis is away, the split stays, and counts wait.
If Redis has lost the state, a gateway that knows it gives it back.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Protocol

from galley.common.logs import get_logger
from galley.common.repeated_work import RepeatedWork
from galley.core import names
from galley.core.answer.answer import SessionSpec
from galley.core.errors import GalleyError
from galley.core.versions.counts import VersionCounts
from galley.core.versions.rule import Outcome, Rule, decide
from galley.core.versions.split import Split
from galley.core.versions.state import (
    Change,
    VersionEvent,
    VersionState,
    promote,
    replace_trial,
    restore,
    roll_back,
    try_version,
)
from services.gateway.replicas.draft_session import DraftSession
from services.gateway.replicas.drafts import DraftPool
from services.gateway.session.tally import SessionTally
from services.gateway.telemetry.component_metrics import Ending, VersionMetrics
from services.gateway.telemetry.observer import request_observer

READ_S = 1.0
EMPTY_READS = 6
"""Reads without a state before a setting begins a trial.

Gateways that know a lost one give it back first, also one that waits for an answer that was lost.
"""

_RULE, _SETTING, _GATEWAY = "rule", "draft_split", "gateway"
_ENDINGS: Mapping[Outcome, Ending] = {
    Outcome.PROMOTE: "promoted",
    Outcome.ROLL_BACK: "rolled_back",
    Outcome.NO_GAIN: "no_gain",
}

_NONCE_BYTES = 8

_log = get_logger(__name__)


class VersionStore(Protocol):
    """The versions of a deployment; each call is one attempt (`galley.common.registry.trials`)."""

    async def read(self) -> VersionState: ...

    async def change(self, expected_epoch: int, new: VersionState, event: VersionEvent) -> bool: ...

    async def add(self, version: str, counts: VersionCounts, trial: int) -> bool: ...

    async def counts(self, of: Collection[str]) -> Mapping[str, VersionCounts]: ...

    async def history(self) -> list[VersionEvent]: ...

    async def close(self) -> None: ...


class VersionKeeper:
    """The versions as this gateway knows them. Call `start` at the beginning and `close` at the end."""

    def __init__(
        self,
        store: VersionStore,
        drafts: DraftPool,
        trial: tuple[str, float] | None = None,
        metrics: VersionMetrics | None = None,
    ) -> None:
        """Begin a trial of `trial`, a version and its share, unless that version was decided.

        It takes the place of a trial that began by another gateway's setting before this gateway.
        """
        self.state = VersionState()
        self._store = store
        self._drafts = drafts
        self._own_trial = trial
        self._empty_reads = 0
        self._earlier_trial: int | None = None
        """The trial that the own one replaces; 0 for none, None until the store was read."""
        self._metrics = metrics
        self._unconfirmed: tuple[VersionEvent, Outcome] | None = None
        """The latest change by this gateway, until it is known whether the store has made it."""
        self._waiting: dict[tuple[str, int], VersionCounts] = {}
        """Counts that the store does not have, by version and trial."""
        self._problem = ""
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Follow the store now, and then once a second."""
        await self.turn()
        self._task = asyncio.create_task(RepeatedWork("reading of draft versions", self.turn).repeat(READ_S))

    def version_of(self, spec: SessionSpec) -> str:
        """Return the version that a session is given; empty for one that is given none by name."""
        return self.state.split.canary if self._drafts.is_canary(spec) else self.state.split.stable

    def tally(self, spec: SessionSpec, draft: DraftSession, *, begins: bool) -> SessionTally | None:
        """Return what counts a session that begins here, or None.

        The session counts for the version that it is given, whichever serves it. One that goes on here does
        not count, however often it is resumed: its parts are alike, and it would weigh as many sessions. Nor
        does one that requests no drafts, or any without a trial or while no draft of the canary is available.
        """
        canary = self.state.split.canary
        if not canary or not spec.k or not self._drafts.serves(canary):
            return None
        version = self.version_of(spec)
        request_observer().event(
            names.DRAFT_ASSIGNED, {names.DRAFT_VERSION: version, names.IS_CANARY: version == canary}
        )
        report = partial(self._count, version, self.state.trial)
        return SessionTally(draft, spec.tenant_salt, report) if begins else None

    async def turn(self) -> None:
        """Follow the store once: take over its state, give it counts, begin or end a trial if it is due."""
        try:
            await self._read()
            await self._flush()
            if (trial := self._due_trial()) is not None:
                await self._change(*trial, Outcome.KEEP)
            elif (end := await self._due_end()) is not None:
                await self._change(*end)
        except GalleyError as error:
            if self._problem != str(error):
                self._problem = str(error)
                _log.warning("versions of drafts unavailable; the split stays", error=self._problem)
        else:
            self._problem = ""

    async def close(self) -> None:
        """Stop, and give the store the last counts."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        with suppress(GalleyError):
            await self._flush()
        await self._store.close()

    async def _read(self) -> None:
        """Take over the state of the store. If it has none, give it the one that is known here."""
        state = await self._store.read()
        if state.epoch < self.state.epoch:
            if not state.epoch:
                await self._restore()
                return
            # Whoever has changed a store since its loss knows better than this gateway.
            _log.warning("versions of drafts are older", epoch=state.epoch, known_epoch=self.state.epoch)
        self._use(state)
        await self._confirm()

    async def _restore(self) -> None:
        """Give the store this gateway's state, unless another caller is first."""
        if await self._store.change(0, *restore(self.state, author=_GATEWAY)):
            facts = {"epoch": self.state.epoch, **_facts(self.state.split)}
            _log.warning("versions of drafts restored; the store had lost them", **facts)

    def _use(self, state: VersionState) -> None:
        before, self.state = self.state, state
        if state.split != before.split:
            self._drafts.use_split(state.split)
            _log.info("split of sessions changed", **_facts(state.split))

    def _count(self, version: str, trial: int, counts: VersionCounts) -> None:
        if self._metrics is not None:
            self._metrics.finished(version, counts.output_tokens, counts.accepted)
        key = (version, trial)
        self._waiting[key] = self._waiting.get(key, VersionCounts()) + counts

    async def _flush(self) -> None:
        """Give the store the counts that wait; what a call that fails was to give waits on."""
        for key in list(self._waiting):
            version, trial = key
            counts = self._waiting.pop(key)
            try:
                await self._store.add(version, counts, trial)
            except GalleyError:
                self._waiting[key] = self._waiting.get(key, VersionCounts()) + counts
                raise

    def _due_trial(self) -> Change | None:
        """Return the beginning of the trial of the gateway's settings, once."""
        if self._own_trial is None:
            return None
        version, share = self._own_trial
        state, split = self.state, self.state.split
        if not state.epoch and self._empty_reads < EMPTY_READS:
            self._empty_reads += 1
            return None
        if self._earlier_trial is None:
            # A trial that begins later may be that of a newer setting than this gateway's.
            self._earlier_trial = state.trial if split.canary and state.author == _SETTING else 0
        if version in {split.canary, split.stable} or version in state.decided:
            self._own_trial = None
            if reason := state.decided.get(version):
                _log.info("no trial of the setting: its version was decided", version=version, reason=reason)
            return None
        if not split.canary:
            return try_version(state, version, share, author=_SETTING)
        if state.trial == self._earlier_trial:
            return replace_trial(state, version, share, author=_SETTING)
        return None

    async def _due_end(self) -> tuple[VersionState, VersionEvent, Outcome] | None:
        """Return the end of the trial in force, if the rule says so."""
        state, split = self.state, self.state.split
        if not split.canary:
            return None
        counts = await self._store.counts((split.stable, split.canary))
        decision = decide(split, counts[split.stable], counts[split.canary], Rule(state.tokens))
        if decision.outcome is Outcome.KEEP:
            return None
        if decision.outcome is Outcome.PROMOTE:
            return *promote(state, split.canary, author=_RULE, reason=decision.reason), decision.outcome
        return *roll_back(state, author=_RULE, reason=decision.reason), decision.outcome

    async def _change(self, new: VersionState, event: VersionEvent, outcome: Outcome) -> None:
        """Change the state; if another caller was first, or the reply is lost, the next turn shows how."""
        event = replace(event, nonce=secrets.token_hex(_NONCE_BYTES))
        self._unconfirmed = event, outcome
        is_made = await self._store.change(self.state.epoch, new, event)
        self._unconfirmed = None
        if is_made:
            self._use(new)
            self._note_change(event, outcome)

    async def _confirm(self) -> None:
        """Note this gateway's latest change, if its reply was lost and the store has made it."""
        if self._unconfirmed is None:
            return
        event, outcome = self._unconfirmed
        is_made = any(it.nonce == event.nonce for it in await self._store.history())
        self._unconfirmed = None
        if is_made:
            self._note_change(event, outcome)

    def _note_change(self, event: VersionEvent, outcome: Outcome) -> None:
        """Log and count a change by this gateway."""
        facts = {"version": event.version, "reason": event.reason}
        if event.kind == "try":
            _log.info("trial of a draft began", share=event.share, **facts)
        elif event.kind == "promote":
            _log.info("draft promoted", **facts)
        else:
            _log.warning("draft rolled back", **facts)
        if self._metrics is not None and (ending := _ENDINGS.get(outcome)):
            self._metrics.decided(ending)


def _facts(split: Split) -> dict[str, str | float]:
    return {
        "stable": split.stable,
        "canary": split.canary,
        "share": split.share,
        "by": split.by,
        "drained": ",".join(sorted(split.drained)),
    }
