"""Prompt lookup: guess that what followed the last tokens before will follow them again.

As in "Prompt Lookup Decoding" (Saxena, 2023): no model, only the session's own tokens.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_WORD = array("I").itemsize


def propose(tokens: Sequence[int], k: int, *, min_n: int, max_n: int) -> list[int]:
    """Up to `k` tokens that followed the most recent earlier occurrence of the longest suffix that has one.

    Suffixes of `max_n` tokens are tried first, then shorter ones down to `min_n`; none found, none proposed.
    An occurrence may overlap the suffix: the continuation then runs into the proposal itself, so that a
    period is carried on. Raises ValueError unless 1 <= min_n <= max_n.
    """
    if not 1 <= min_n <= max_n:
        raise ValueError(f"1 <= min_n <= max_n, are {min_n} and {max_n}")
    if k <= 0:
        return []
    # As bytes, because searching those is a C loop: some tens of microseconds over thousands of tokens.
    text = array("I", tokens).tobytes()
    for n in range(min(max_n, len(tokens) - 1), min_n - 1, -1):
        start = _last_occurrence(text, n)
        if start is not None:
            return _continuation(tokens, start + n, k)
    return []


def _last_occurrence(text: bytes, n: int) -> int | None:
    """Where, in tokens, the last `n` tokens stand once more, latest first; None if nowhere."""
    suffix = text[-n * _WORD :]
    end = len(text) - _WORD  # so that a token follows, and the suffix does not find itself
    while (at := text.rfind(suffix, 0, end)) >= 0:
        if at % _WORD == 0:
            return at // _WORD
        end = at + len(suffix) - 1  # a hit across the boundary of tokens
    return None


def _continuation(tokens: Sequence[int], start: int, k: int) -> list[int]:
    proposal: list[int] = []
    for i in range(start, start + k):
        proposal.append(tokens[i] if i < len(tokens) else proposal[i - len(tokens)])
    return proposal
