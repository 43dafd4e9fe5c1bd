"""Read the tokens of long requests in parts, between which other requests get a turn of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeAlias
from weakref import WeakValueDictionary

from galley.common.wire.codec import check_identity, check_positions, check_token_ids
from galley.core.content import BlockChain, SessionKey
from galley.pb.galley.v1 import galley_pb2 as pb

PART_TOKENS = 8192
"""Reading, checking and hashing so many tokens takes about 1 ms."""

# The tokens, and the hashes of the full blocks from the session's start on.
LongRead: TypeAlias = tuple[Sequence[int], Sequence[bytes]]


class LongReader:
    """Read long requests one at a time, so that others wait for one part at most.

    Further requests of a session wait meanwhile, so that all of them are read in order.
    """

    def __init__(self, vocab_size: int, context_window: int) -> None:
        self._vocab_size = vocab_size
        self._context_window = context_window
        self._reading = asyncio.Lock()
        self._order: WeakValueDictionary[SessionKey, asyncio.Lock] = WeakValueDictionary()

    async def read(
        self, part: pb.SessionSlice, chain_of: Callable[[], BlockChain | None] = lambda: None
    ) -> LongRead | None:
        """Return what was read of a long slice; None for a short one, once it is its turn.

        `chain_of` returns the hashes before the slice, if they are wanted. Requests of a session return in
        the order of these calls. Raise InvalidField.
        """
        session, is_long = (part.tenant_salt, part.session_id), len(part.tokens) > PART_TOKENS
        if not is_long and session not in self._order:
            return None
        async with self._order.setdefault(session, asyncio.Lock()):
            if not is_long:
                return None
            check_identity(part)
            check_positions(part, self._context_window)
            async with self._reading:
                chain = chain_of()
                tokens = await self._tokens(part.tokens, chain)
            return tokens, chain.hashes if chain is not None else ()

    async def _tokens(self, tokens: Sequence[int], chain: BlockChain | None) -> list[int]:
        read: list[int] = []
        for first in range(0, len(tokens), PART_TOKENS):
            await asyncio.sleep(0)
            part = list(tokens[first : first + PART_TOKENS])
            check_token_ids("slice.tokens", part, self._vocab_size, first)
            if chain is not None:
                chain.add(part)
            read += part
        await asyncio.sleep(0)  # what is done with them takes a turn of its own
        return read
