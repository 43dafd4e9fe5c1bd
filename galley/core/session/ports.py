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
    address: str
    incarnation: str


class Clock(Protocol):
    def now_ns(self) -> int: ...


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
        """The replica that answers, also after the end; None if there is none."""

    def __aiter__(self) -> AsyncIterator[Verified | CacheMissed | Failed]: ...

    def extend(self, request: ExtendVerify) -> None:
        """Send more of the request. Never blocks, may be called before it was sent, ignored after its end."""

    async def aclose(self) -> None: ...


class TargetPort(Protocol):
    def verify(self, spec: SessionSpec, request: Verify, remaining_ns: int | None) -> Verification:
        """Open a Verify at once; its results are useless after `remaining_ns` (None: never)."""
