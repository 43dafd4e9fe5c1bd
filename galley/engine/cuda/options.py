"""How a CUDA device is used; nothing here changes anything on the CPU."""

from __future__ import annotations

from dataclasses import dataclass

# Where bits must be the same all passes have so many rows: every product and every norm then has one shape.
FIXED_ROWS = 128


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """`flex`: attention that reads pages in place, where it can be compiled, and not plain torch.

    Only with it come `graphs` (one rank only) and `invariant`: a row has the same bits in any pass.
    """

    flex: bool = True
    graphs: bool = True
    invariant: bool = False

    def rows_of_pass(self, device: str, most: int) -> int:
        """The most rows that one pass may have there, of at most `most`."""
        return most if device.startswith("cpu") or not self.invariant else FIXED_ROWS
