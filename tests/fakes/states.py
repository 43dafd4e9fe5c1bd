"""The states of fake targets: each is a pure function of a token, its position and the layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from zlib import crc32

from galley.core.features import States

SIZE = 4
LAYERS = 8
_EXPONENT = 0x3F  # of a bfloat16 between 0.5 and 2


@lru_cache(maxsize=1 << 14)
def state_of(token: int, position: int, layers: Sequence[int]) -> bytes:
    """Return the state of the token at this position after these layers: bfloat16, [layers, SIZE]."""
    drawn = b"".join(
        crc32(b"%d %d %d" % (token, position, layer)).to_bytes(SIZE, "little") for layer in layers
    )
    return b"".join(bytes((low, _EXPONENT)) for low in drawn)


def states_of(tokens: Sequence[int], position: int, end: int, layers: Sequence[int]) -> States:
    """Return the states of tokens [position, end) of these, the first of which is at position 0."""
    chosen = tuple(layers)
    data = b"".join(state_of(tokens[at], at, chosen) for at in range(position, end))
    return States(position, end - position, data)
