"""The ranks of a tensor-parallel model, as the forward pass uses them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class Waits:
    ns: int = 0


class Ranks:
    """`size` processes that run the same step, each on its shard of the weights; this one is `rank`.

    An object of this class itself is one process with all of the weights.
    """

    size = 1
    rank = 0

    def add(self, part: Tensor) -> Tensor:
        """Return the sum of the ranks' partial results, gathered and added in rank order."""
        return part

    def join_columns(self, part: Tensor) -> Tensor:
        """Return the ranks' columns [rows, n / size] side by side in rank order: [rows, n]."""
        return part

    def waits(self) -> AbstractContextManager[Waits]:
        return nullcontext(Waits())


ALONE = Ranks()
