"""Sessions that went from one replica to another: counted, logged, and told to the trace."""

from __future__ import annotations

from collections import Counter

from galley.common.logs import get_logger
from galley.core.names import MOVE_RESTARTED
from galley.core.session.ports import Replica
from services.gateway.telemetry.observer import request_observer

_log = get_logger(__name__)


class Moves:
    """Of one pool; `counts` is by reason (`galley.core.names`), for metrics."""

    def __init__(self, pool: str) -> None:
        """`pool` is "draft" or "target"."""
        self.pool = pool
        self.counts: Counter[str] = Counter()

    def note(self, session_id: str, source: Replica, to: Replica, reason: str) -> None:
        """The first answer from elsewhere has come."""
        if source.address == to.address:
            reason = MOVE_RESTARTED
        self.counts[reason] += 1
        facts = {"pool": self.pool, "source": source.address, "to": to.address, "reason": reason}
        _log.info("session moved", session_id=session_id, **facts)
        request_observer().moved(**facts)
