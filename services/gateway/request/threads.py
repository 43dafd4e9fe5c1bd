"""Parse prompts in threads, so that long ones hold neither the event loop nor the prompts of others.

A thread begins and ends in several turns of a busy event loop. So a short prompt is parsed in the loop:
the prompts of one principal would wait for each other much longer than they take.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakValueDictionary

from galley.pb.galley.v1 import galley_pb2 as pb

T = TypeVar("T")

SHORT_BYTES = 1024
FEW_MESSAGES = 16


def is_short(request: pb.GenerateRequest) -> bool:
    """Return True if the request needs no thread: it is parsed and tokenized in less than a millisecond."""
    return (
        request.ByteSize() <= SHORT_BYTES
        and len(request.messages.messages) <= FEW_MESSAGES
        and not request.HasField("structured_output")
    )


class PromptThreads:
    """Threads that parse one prompt of each principal at a time.

    Otherwise the long prompts of one principal would fill the threads, and the prompts of others would wait
    for all of them.
    """

    def __init__(self) -> None:
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def run(self, principal: str, parse: Callable[[], T]) -> T:
        """Return `parse()`, called in a thread. Raise what it raises."""
        turn = self._turns.setdefault(principal, asyncio.Semaphore())
        await turn.acquire()
        parsing = asyncio.ensure_future(asyncio.to_thread(parse))

        def end(parsed: asyncio.Future[T]) -> None:
            turn.release()
            if not parsed.cancelled():
                parsed.exception()  # nobody else asks for it if the caller has gone

        parsing.add_done_callback(end)
        # The thread goes on when its call is cancelled, and so does the principal's turn.
        return await asyncio.shield(parsing)
