"""Read the tokens of long requests in slices, between which other requests get a turn of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from galley.common.wire.codec import check_token_ids
from galley.core.content import BlockChain

SLICE_TOKENS = 8192
"""Reading, checking and hashing so many tokens takes about 1 ms."""


async def read_tokens(tokens: Sequence[int], vocab_size: int, chain: BlockChain | None) -> list[int]:
    """Return the tokens of a slice of a session, added to the `chain` of those before, if there is one.

    Raise InvalidField for the first id outside the vocabulary.
    """
    read: list[int] = []
    for first in range(0, len(tokens), SLICE_TOKENS):
        await asyncio.sleep(0)
        part = list(tokens[first : first + SLICE_TOKENS])
        check_token_ids("slice.tokens", part, vocab_size, first)
        if chain is not None:
            chain.add(part)
        read += part
    await asyncio.sleep(0)  # what is done with them takes a turn of its own
    return read
