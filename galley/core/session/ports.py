"""The ports of the gateway: what a session needs besides the session store.

The simulator implements them on an event loop of virtual time; `services/gateway` implements the real ones.
All times are nanoseconds.
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
    """A replica's address and the incarnation of its process."""

    address: str
    incarnation: str


class Clock(Protocol):
    """A clock that only moves forward."""

    def now_ns(self) -> int:
        """Return nanoseconds since some fixed moment."""


class DraftPort(Protocol):
    """The draft of a session. Raises only CancelledError; failures are returned as Failed."""

    @property
    def replica(self) -> Replica | None:
        """The replica that answers, for the KV directory; None if there is none."""

    async def propose(
        self, spec: SessionSpec, request: Propose, remaining_ns: int | None
    ) -> Proposed | CacheMissed | Failed:
        """Request draft tokens; the response is useless after `remaining_ns` (None: never)."""


class Verification(Protocol):
    """One open Verify at a target. Iterate over it, once, for its results.

    Results come in order, with `more` set on all but the last; a CacheMissed or Failed also ends them. Raises
    only CancelledError. `aclose`, or cancelling the wait for the next result, gives the request up.
    """

    @property
    def replica(self) -> Replica | None:
        """The replica that answers, for the KV directory; None if there is none. Kept after the end."""

    def __aiter__(self) -> AsyncIterator[Verified | CacheMissed | Failed]:
        """Return the results as they arrive."""

    def extend(self, request: ExtendVerify) -> None:
        """Send more of the request. Never blocks, may be called before it was sent, ignored after its end."""

    async def aclose(self) -> None:
        """Give the request up, if it is open."""


class TargetPort(Protocol):
    """The target of a session."""

    def verify(self, spec: SessionSpec, request: Verify, remaining_ns: int | None) -> Verification:
        """Open a Verify at once; its results are useless after `remaining_ns` (None: never)."""
