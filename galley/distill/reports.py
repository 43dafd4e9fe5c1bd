"""What a distillation tells whoever waits for it; the command shows it, tests collect it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from galley.distill.training.evaluation import Acceptance


class Reports(Protocol):
    """Called from the thread that works."""

    def stage(self, name: str, total: int) -> None:
        """A stage of `total` units begins."""

    def done(self, units: int, note: str = "") -> None:
        """So many units of the stage are done."""

    def measured(self, seen: int, found: dict[str, Acceptance]) -> None:
        """The acceptance after `seen` answer tokens."""
