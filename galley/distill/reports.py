"""Progress reports of a distillation: the command prints them, tests collect them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from galley.distill.training.evaluation import Acceptance


class Reports(Protocol):
    """Receives progress, on the thread that works."""

    def stage(self, name: str, total: int) -> None:
        """Begin a stage of `total` units."""

    def done(self, units: int, note: str = "") -> None:
        """Set how many units of the stage are done."""

    def measured(self, seen: int, acceptance: dict[str, Acceptance]) -> None:
        """Report the acceptance after `seen` answer tokens."""
