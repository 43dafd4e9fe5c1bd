"""Draw which schedules have audits."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.simulation.schedule import Schedule

AUDITS = "audits"
"""The theme in which gateways audit each session that finishes. A part of all other schedules does so too."""

_AUDITED = 0.1
"""Share of the other schedules with audits."""
_FIRST_SEED = 1_000
"""The seeds before it are those of tests, which were chosen for what their schedules show."""


def with_audits(schedule: Schedule, *, always: bool = False) -> Schedule:
    """Let a part of the schedules have audits; a draw of its own leaves all else of a seed as it was."""
    is_drawn = random.Random(f"audits {schedule.seed}").random() < _AUDITED
    return replace(schedule, audits=always or (is_drawn and schedule.seed >= _FIRST_SEED))
