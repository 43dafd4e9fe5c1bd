"""The versions of a world's drafts: what happens to them, and what must hold."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial, reduce
from operator import add
from typing import TYPE_CHECKING

from galley.core.versions import state as versions
from galley.core.versions.counts import VersionCounts, session_counts
from galley.core.versions.rule import Outcome, Rule, decide
from galley.core.versions.split import Split
from galley.core.versions.state import Change, VersionState
from services.gateway.versions import keeper
from tests.simulation.schedule import Fault, VersionPlan
from tests.simulation.system.redis import at_once

if TYPE_CHECKING:
    from tests.simulation.world import World

_SENT_S = 0.6
"""Time in which a gateway that has read a change has sent what it began before, if nothing fails."""
_JUDGED_SESSIONS = 60


class WorldVersions:
    def __init__(self, world: World, plan: VersionPlan) -> None:
        self._world = world
        self._plan = plan
        self._given: dict[tuple[str, str], bool] = {}

    def plan(self) -> None:
        """Plan the changes; those at 0 s have come before the gateways."""
        loop = asyncio.get_running_loop()
        for change in self._plan.changes:
            if change.at_s:
                loop.call_later(change.at_s, self._do, change)

    def begin(self) -> None:
        for change in self._plan.changes:
            if not change.at_s:
                self._do(change)

    @property
    def are_settled(self) -> bool:
        """Return True if all gateways have the split of the store, and no trial goes on that is decided."""
        state = self._state
        known = all(it.keeper is not None and it.keeper.state == state for it in self._world.gateways)
        return known and self._decision(state) is Outcome.KEEP

    def gave(self, session_id: str, state: VersionState, *, is_canary: bool, is_new: bool) -> None:
        """Note which version a session was given; violate a rule if the trial gave it to the other before."""
        if not state.split.canary:
            return
        if is_new:
            self._world.ledger.met["canary's session" if is_canary else "stable version's session"] += 1
        if self._given.setdefault((session_id, state.split.canary), is_canary) != is_canary:
            self._world.ledger.violate(f"{session_id} is given to both versions of a trial")

    def drafted(self, name: str, session_id: str) -> None:
        """Violate a rule if a draft serves a session of another version, although nothing fails."""
        world, plan = self._world, self._plan
        if world.schedule.faults or len(plan.changes) > 1 or not world.ready_s:
            return
        since_s = asyncio.get_running_loop().time() - world.ready_s - plan.settled_s
        if since_s < keeper.READ_S + _SENT_S or world.ledger.rests_until_s:
            return
        split = self._state.split
        is_canary = split.is_canary(session_id, b"", "")
        world.ledger.met["served by its version"] += 1
        if is_canary != (plan.labels[int(name.rpartition("-")[2])] == split.canary):
            world.ledger.violate(f"{name} serves {session_id}, which another version was given")

    @property
    def _state(self) -> VersionState:
        return self._world.redis.versions.state

    def _decision(self, state: VersionState) -> Outcome:
        sums, split = self._world.redis.versions.sums, state.split
        if not split.canary:
            return Outcome.KEEP
        stable, canary = (sums.get(name, VersionCounts()) for name in (split.stable, split.canary))
        return decide(split, stable, canary, Rule(state.tokens)).outcome

    # ------------------------------------------------------------------------------ changes --

    def _do(self, change: Fault) -> None:
        self._world.ledger.note(str(change))
        self._world.ledger.met[f"version: {change.kind}"] += 1
        getattr(self, "_" + change.kind.replace("-", "_"))(change)

    def _apply(self, action: Callable[[VersionState], Change]) -> None:
        """Change the state as a person does."""
        try:
            new, event = action(self._state)
        except ValueError:
            return  # it cannot be, for example because another version is on trial
        at_once(self._world.redis.versions.change(self._state.epoch, new, event))

    def _try(self, change: Fault) -> None:
        self._apply(partial(versions.try_version, version=change.where[0], share=change.amount))

    def _promote(self, change: Fault) -> None:
        self._apply(partial(versions.promote, version=change.where[0]))

    def _drain_version(self, change: Fault) -> None:
        self._apply(partial(versions.drain, version=change.where[0]))

    def _judge(self, change: Fault) -> None:
        """Add what many sessions elsewhere have counted, by which the canary is better or worse."""
        state, split = self._state, self._state.split
        if split.canary:
            store, chance = self._world.redis.versions, random.Random(self._world.schedule.seed)
            for name, gain in ((split.stable, 0.5), (split.canary, change.amount)):
                at_once(store.add(name, _counts(chance, gain, state.tokens), state.trial))

    def _swap(self, change: Fault) -> None:
        """Exchange the weights of a draft; with `amount`, it dies before it says so."""
        name, version = change.where
        draft = self._world.drafts[name]
        if change.amount and draft.process.alive:
            draft.process.crash()
            self._world.network.die(name, silent=False)
            asyncio.get_running_loop().call_later(0.3, self._start, name)
            return
        draft.set_version(version)

    def _start(self, name: str) -> None:
        if not self._world.drafts[name].process.alive:
            self._world.drafts[name].start()

    def _lie(self, change: Fault) -> None:
        """Let a draft's lease name another version than the draft itself."""
        name, version = change.where
        draft = self._world.drafts[name]
        draft.claimed = version
        asyncio.get_running_loop().call_later(change.for_s, setattr, draft, "claimed", None)

    def _twice(self, change: Fault) -> None:
        """Register a draft at a second address, which leads to the same process."""
        self._world.drafts[change.where[0]].register_again(change.for_s)

    def _stray(self, change: Fault) -> None:
        """Let a gateway use another split than all others, until it next reads the store's."""
        gateway = next(it for it in self._world.gateways if it.address == change.where[0])
        if gateway.process.alive:
            gateway.drafts.use_split(Split(stable=change.where[1], drained=frozenset({"old"})))
            asyncio.get_running_loop().call_later(change.for_s, self._return, gateway.address)

    def _return(self, address: str) -> None:
        gateway = next(it for it in self._world.gateways if it.address == address)
        if gateway.process.alive and gateway.keeper is not None:
            gateway.drafts.use_split(gateway.keeper.state.split)


def _counts(chance: random.Random, gain: float, tokens: int) -> VersionCounts:
    each = 2 * tokens // _JUDGED_SESSIONS
    return reduce(
        add,
        (
            session_counts(output_tokens=each, accepted=round(each * gain * chance.uniform(0.9, 1.1)))
            for _ in range(_JUDGED_SESSIONS)
        ),
    )
