"""Why a session goes on at another replica, in the words of logs, traces and metrics."""

from __future__ import annotations

FAILED = "failed"
"""An item failed."""
LATE = "late"
"""It kept one waiting."""
LEFT = "left"
"""It drained or was let go."""
HEDGED = "hedged"
"""The other was asked too, and answered first."""
RESTARTED = "restarted"
"""The same address, another life."""

REASONS = (FAILED, LATE, LEFT, HEDGED, RESTARTED)
