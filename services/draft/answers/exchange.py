"""Exchange recent answers with the other drafts of the pool, twice a second, by the log in Redis.

Proposals never wait for Redis. While it is away, other drafts miss a part of the answers. What was received
is indexed on the worker, between steps: a proposal may wait about a millisecond for one piece of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import accumulate

from galley.common.logs import get_logger, log_internal
from galley.core.lookup.lookup import AnswerPart
from services.draft.answers.log import AnswerLog
from services.draft.answers.mailbox import SharedAnswers, SharedKind

_EVERY_S = 0.5
_RETRY_S = 5.0
# Tokens of a kind that are taken of one exchange, but for the first: a busy pool must not occupy the worker.
_MOST_TOKENS = 8192

_LOG = get_logger(__name__)


class AnswerExchange:
    """The exchanges of one draft, from its creation in the event loop to `close`."""

    def __init__(self, log: AnswerLog, answers: SharedAnswers, wake: Callable[[], None]) -> None:
        """Call `wake` when the worker has work."""
        self._log = log
        self._answers = answers
        self._wake = wake
        self._failed = False
        self._stopping = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep())

    async def close(self) -> None:
        """Publish the last parts, and end."""
        if not self._stopping.done():
            self._stopping.set_result(None)
        await self._task
        await self._log.close()

    async def _keep(self) -> None:
        while not self._stopping.done():
            await asyncio.wait({self._stopping}, timeout=_RETRY_S if self._failed else _EVERY_S)
            published = self._answers.take()
            # Whatever fails, the next exchange may succeed.
            outcomes = await asyncio.gather(
                *(self._exchange(kind, parts) for kind, parts in published.items()), return_exceptions=True
            )
            self._note([outcome for outcome in outcomes if isinstance(outcome, Exception)])

    async def _exchange(self, kind: SharedKind, parts: Sequence[AnswerPart]) -> None:
        is_first = not any(length for _, length in kind.read)
        received = await self._log.exchange(kind, parts)
        if received:
            self._answers.deliver(kind, received if is_first else _last_of(received))
            self._wake()

    def _note(self, errors: Sequence[Exception]) -> None:
        if errors and not self._failed:
            _LOG.warning("answers not shared", error=str(errors[0]))
            log_internal(errors[0])
        self._failed = bool(errors)


def _last_of(parts: Sequence[AnswerPart]) -> Sequence[AnswerPart]:
    totals = accumulate(len(part.tokens) for part in reversed(parts))
    return parts[len(parts) - sum(total <= _MOST_TOKENS for total in totals) :]
