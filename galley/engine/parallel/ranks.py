"""The processes that share one model by tensor parallelism, as the forward pass sees them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class Waits:
    """How long a rank has waited for what the others computed."""

    ns: int = 0


class Ranks(Protocol):
    """`size` processes that run the same pass, each on its shard of the weights; this one is `rank`."""

    @property
    def size(self) -> int:
        """How many there are."""

    @property
    def rank(self) -> int:
        """Which this one is, in [0, size)."""

    def add(self, part: Tensor) -> Tensor:
        """The sum of the ranks' partial results, gathered and added in rank order."""

    def join_columns(self, part: Tensor) -> Tensor:
        """[rows, n / size] of each rank to [rows, n], in rank order."""

    def waits(self) -> AbstractContextManager[Waits]:
        """Within, what this rank waits for the others is counted."""


@dataclass(frozen=True, slots=True)
class Alone:
    """One process with all of the weights."""

    size: int = 1
    rank: int = 0

    def add(self, part: Tensor) -> Tensor:
        """The part is the whole."""
        return part

    def join_columns(self, part: Tensor) -> Tensor:
        """The part is the whole."""
        return part

    def waits(self) -> AbstractContextManager[Waits]:
        """There is nobody to wait for."""
        return nullcontext(Waits())


ALONE = Alone()
