"""The ports of the gateway's shell: what it needs of the world besides the session store.

A simulator passes its own, and runs the shell on an event loop whose time is its Clock's (the shell's timers
are asyncio's). The real ones are in `services/gateway`. All times are nanoseconds.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from galley.core.answer.answer import SessionSpec
from galley.core.session.events import (
    CacheMissed,
    ExtendVerify,
    Failed,
    Propose,
    Proposed,
    Verified,
    Verify,
)


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


class Verification(Protocol):
    """One item at a target: its answers are had by iterating, once.

    They are results in order, `more` set on all but the last; a CacheMissed or Failed ends them as well.
    Never raises but for cancellation. An item that is still open is given up by `aclose`, or by cancelling
    who waits for its next answer.
    """

    @property
    def replica(self) -> Replica | None:
        """Who answers, for the KV directory; None while nobody does. Stays when the item has ended."""

    def __aiter__(self) -> AsyncIterator[Verified | CacheMissed | Failed]:
        """The answers as they come."""

    def extend(self, request: ExtendVerify) -> None:
        """Tell the target more of this item; never blocks, and may come before the item has been sent.

        Of an item that has ended, it is ignored.
        """

    async def aclose(self) -> None:
        """Give the item up, if it is open."""


class TargetPort(Protocol):
    """The target pool."""

    def verify(self, spec: SessionSpec, request: Verify, remaining_ns: int | None) -> Verification:
        """Ask for verdicts, at once; after `remaining_ns` they are of no use (None: never)."""
