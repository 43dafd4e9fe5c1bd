"""The clock of the process, for the core's ports."""

from __future__ import annotations

import time
from dataclasses import dataclass

SECOND = 1_000_000_000
MILLISECOND = 1_000_000


class MonotonicClock:
    """Nanoseconds of the process's monotonic clock."""

    now_ns = staticmethod(time.monotonic_ns)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts of one session.

    `renew_ns` is the interval at which the session's expiry is renewed; the store keeps a session, also a
    finished one, for at least three times as long. `client_ns` is how long a client may leave its stream
    unread.
    """

    store_ns: int = 10 * SECOND
    verify_ns: int = 120 * SECOND
    draft_ns: int = SECOND // 2
    renew_ns: int = 300 * SECOND
    client_ns: int = 60 * SECOND

    @property
    def trusted_ns(self) -> int:
        """Return how long the store keeps a session that it held; a third is left for calls under way."""
        return 2 * self.renew_ns

    def store_deadline_ns(self, now_ns: int, deadline_ns: int | None) -> int:
        """Return when to give up on the store: a second before the call's deadline, to report the reason."""
        until = now_ns + self.store_ns
        return until if deadline_ns is None else min(until, max(now_ns, deadline_ns - SECOND))
