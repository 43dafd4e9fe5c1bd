"""Options of a CUDA device; they change nothing on the CPU."""

from __future__ import annotations

from dataclasses import dataclass

# Rows of every step if bits must be the same: each product and norm then has one shape.
FIXED_ROWS = 128


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """`flex`: attention that reads pages in place, if it can be compiled, instead of plain torch.

    Only with `flex` do `graphs` (one rank only) and `invariant` (a row has the same bits in any step) work.
    """

    flex: bool = True
    graphs: bool = True
    invariant: bool = False

    def rows_of_step(self, device: str, max_rows: int) -> int:
        return max_rows if device.startswith("cpu") or not self.invariant else FIXED_ROWS
