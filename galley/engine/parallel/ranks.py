"""The ranks of a tensor-parallel model, as the forward pass uses them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class Waits:
    """The time that a rank has waited for the others, in ns."""

    ns: int = 0


class Ranks(Protocol):
    """`size` processes that run the same step, each on its shard of the weights; this one is `rank`."""

    @property
    def size(self) -> int:
        """Return the number of ranks."""

    @property
    def rank(self) -> int:
        """Return this process's rank, in [0, size)."""

    def add(self, part: Tensor) -> Tensor:
        """Return the sum of the ranks' partial results, gathered and added in rank order."""

    def join_columns(self, part: Tensor) -> Tensor:
        """Return [rows, n] of the ranks' [rows, n / size], in rank order."""

    def waits(self) -> AbstractContextManager[Waits]:
        """Count the time that this rank waits for the others."""


@dataclass(frozen=True, slots=True)
class Alone:
    """One process with all of the weights."""

    size: int = 1
    rank: int = 0

    def add(self, part: Tensor) -> Tensor:
        """Return the part, which is the whole."""
        return part

    def join_columns(self, part: Tensor) -> Tensor:
        """Return the part, which is the whole."""
        return part

    def waits(self) -> AbstractContextManager[Waits]:
        """Count nothing."""
        return nullcontext(Waits())


ALONE = Alone()
