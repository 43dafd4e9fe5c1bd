"""Reports that a test looks at, and through which it kills a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from galley.distill.training.evaluation import Acceptance


class Killed(Exception):
    """The run ends here, whatever it was about to store."""


@dataclass
class Collected:
    kill_at: tuple[str, float] | None = None
    reports: list[tuple[str, int]] = field(default_factory=list)
    _stage: tuple[str, int] = ("", 0)

    def stage(self, name: str, total: int) -> None:
        self._stage = (name, total)

    def done(self, units: int, note: str = "") -> None:
        name, total = self._stage
        self.reports.append((name, units))
        if self.kill_at is not None and name == self.kill_at[0] and units >= self.kill_at[1] * total:
            raise Killed

    def measured(self, seen: int, acceptance: dict[str, Acceptance]) -> None:
        pass

    def first_of(self, stage: str) -> int:
        return next(units for name, units in self.reports if name == stage)
