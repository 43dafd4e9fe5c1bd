"""The versions of drafts of a deployment, in memory; several gateways share one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from galley.core.errors import StoreUnavailable
from galley.core.versions.counts import VersionCounts
from galley.core.versions.state import VersionEvent, VersionState, forget_earliest


class MemoryVersions:
    def __init__(self) -> None:
        self.state = VersionState()
        self.sums: dict[str, VersionCounts] = {}
        self.events: list[VersionEvent] = []
        self.refused = 0
        """Changes of a state that had changed before."""
        self.away: Collection[str] = ()
        """The calls that fail."""
        self.calls: Counter[str] = Counter()
        self.registered: Collection[str] = ()
        """The versions that draft replicas serve."""

    async def read(self) -> VersionState:
        self._call("read")
        return self.state

    async def change(self, expected_epoch: int, new: VersionState, event: VersionEvent) -> bool:
        self._call("change")
        if expected_epoch != self.state.epoch:
            self.refused += 1
            return False
        self.state = replace(forget_earliest(new, self.registered), since_ms=new.trial)
        self.events.append(replace(event, epoch=new.epoch))
        if new.trial == new.epoch:
            for name in {new.split.stable, new.split.canary, ""}:
                self.sums.pop(name, None)
        return True

    async def add(self, version: str, counts: VersionCounts, trial: int) -> bool:
        self._call("add")
        if not self.state.epoch or trial != self.state.trial:
            return False
        self.sums[version] = self.sums.get(version, VersionCounts()) + counts
        return True

    async def counts(self, of: Collection[str]) -> dict[str, VersionCounts]:
        self._call("counts")
        return {name: self.sums.get(name, VersionCounts()) for name in of}

    async def history(self) -> list[VersionEvent]:
        self._call("history")
        return self.events[::-1]

    async def close(self) -> None:
        pass

    def _call(self, name: str) -> None:
        self.calls[name] += 1
        if name in self.away:
            raise StoreUnavailable("the session store is unavailable")
