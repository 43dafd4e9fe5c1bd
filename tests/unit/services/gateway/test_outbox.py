"""The outbox of a long answer: items are made as the client reads them."""

from __future__ import annotations

from collections.abc import Iterator

from galley.core.answer.answer import Chunk
from galley.core.session import events as ev
from services.gateway.clock import SECOND, MonotonicClock
from services.gateway.session.outbox import _READY_ITEMS, Outbox

LONG = 8_000


class Answered:
    """An answer whose drafted tokens alternate with others, so that each token is an item."""

    def __init__(self) -> None:
        self.made = 0
        self.sent: list[ev.Event] = []
        self.outbox = Outbox(MonotonicClock(), 60 * SECOND, self.sent.append)

    def items(self) -> Iterator[Chunk]:
        for index in range(LONG):
            self.made += 1
            yield Chunk(index, (5,), "x", from_draft=bool(index % 2))


async def test_items_of_a_long_answer_are_made_as_they_are_read() -> None:
    answered = Answered()
    answered.outbox.put(answered.items(), LONG)
    indexes = []
    for count in range(LONG):
        assert answered.made <= count + _READY_ITEMS
        item = await answered.outbox.next()
        assert isinstance(item, Chunk)
        indexes.append(item.index)
    assert indexes == list(range(LONG))
    assert answered.sent == [ev.Sent(index + 1) for index in range(LONG)]
    answered.outbox.close()


async def test_an_end_drops_what_was_not_made_yet() -> None:
    answered = Answered()
    answered.outbox.put(answered.items(), LONG)
    answered.outbox.end(ev.End())
    assert isinstance(await answered.outbox.next(), Chunk), "the first item counts as sent"
    assert await answered.outbox.next() == ev.End()


async def test_a_long_answer_that_nobody_reads_counts_as_sent_at_once() -> None:
    answered = Answered()
    answered.outbox.put(answered.items(), LONG - 1)
    made = answered.made
    answered.outbox.discard()
    answered.outbox.put(answered.items(), LONG)
    assert answered.made == made
    assert answered.sent == [ev.Sent(1), ev.Sent(LONG - 1), ev.Sent(LONG)]
