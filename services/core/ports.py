"""The ports of the gateway's shell: what it needs of the world besides the session store.

A simulator passes its own, and runs the shell on an event loop whose time is its Clock's (the shell's timers
are asyncio's). The real ones are in `services/gateway`. All times are nanoseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from services.core.answer import SessionSpec
    from services.core.events import CacheMissed, Failed, Propose, Proposed, Verified, Verify


@dataclass(frozen=True, slots=True)
class Replica:
    """Who answers; `incarnation` names one life of its process."""

    address: str
    incarnation: str


class Clock(Protocol):
    """Time that only moves forward."""

    def now_ns(self) -> int:
        """Nanoseconds since some fixed moment."""


class DraftPort(Protocol):
    """The draft pool. Never raises but for cancellation: what fails comes back as Failed."""

    @property
    def replica(self) -> Replica | None:
        """Who answers, for the KV directory; None while nobody does."""

    async def propose(
        self, spec: SessionSpec, request: Propose, remaining_ns: int | None
    ) -> Proposed | CacheMissed | Failed:
        """Ask for draft tokens; after `remaining_ns` the answer is of no use (None: never)."""


class TargetPort(Protocol):
    """The target pool. Never raises but for cancellation: what fails comes back as Failed."""

    @property
    def replica(self) -> Replica | None:
        """Who answers, for the KV directory; None while nobody does."""

    async def verify(
        self, spec: SessionSpec, request: Verify, remaining_ns: int | None
    ) -> Verified | CacheMissed | Failed:
        """Ask for a verdict; after `remaining_ns` the answer is of no use (None: never)."""
