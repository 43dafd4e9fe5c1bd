"""The outbox of an answer: items are made as the client reads them, and have all that waits."""

from __future__ import annotations

from collections.abc import Iterator

from galley.core.answer.answer import MAX_CHUNK_TOKENS, Answer, Chunk, NumericsChanged
from galley.core.records import TokenRecord
from galley.core.session import events as ev
from services.gateway.clock import SECOND, MonotonicClock
from services.gateway.session.outbox import Item, Outbox
from tests.fakes.session_ports import SPEC, TOKEN

LONG = 8_000


class Answered:
    """An answer of `LONG` tokens, and how many chunks were made of it."""

    def __init__(self) -> None:
        self.made = 0
        self.reports: list[ev.Event] = []
        self.outbox = Outbox(MonotonicClock(), 60 * SECOND, self.chunks, self.reports.append)

    def chunks(self, start: int, end: int) -> Iterator[Item]:
        for index in range(start, end):
            self.made += 1
            yield Chunk(index, (5,), "x", from_draft=(False,))


async def test_items_of_a_long_answer_are_made_as_they_are_read() -> None:
    answered = Answered()
    answered.outbox.put(0, LONG)
    indexes = []
    for count in range(LONG):
        assert answered.made <= count
        item = await answered.outbox.next()
        assert isinstance(item, Chunk)
        indexes.append(item.index)
    assert indexes == list(range(LONG))
    assert answered.reports == [ev.Sent(index + 1) for index in range(LONG)]
    answered.outbox.close()


async def test_an_end_drops_what_was_not_read_yet() -> None:
    answered = Answered()
    answered.outbox.put(0, LONG)
    assert isinstance(await answered.outbox.next(), Chunk)
    answered.outbox.end(ev.End())
    assert await answered.outbox.next() == ev.End()


async def test_a_long_answer_that_nobody_reads_counts_as_sent_at_once() -> None:
    answered = Answered()
    answered.outbox.put(0, LONG - 1)
    answered.outbox.discard()
    answered.outbox.put(LONG - 1, LONG)
    assert answered.made == 0
    assert answered.reports == [ev.Sent(LONG - 1), ev.Sent(LONG)]


async def test_tokens_that_wait_go_into_one_message() -> None:
    answer = Answer(SPEC, lambda tokens: "x" * len(tokens))
    outbox = Outbox(MonotonicClock(), 60 * SECOND, answer.chunks, lambda _: None)
    builds = ["a"] * (MAX_CHUNK_TOKENS + 2) + ["b"] * 3
    for at, build in enumerate(builds):
        changed = build != answer.fingerprint
        answer.records.append(TokenRecord(bool(at % 2), None, build if changed else None))
        answer.tokens.append(TOKEN)
        answer._texts.append("xy")
        if changed:
            answer.fingerprint = build
            answer._builds.append((at, build))
        outbox.put(at, at + 1)
    items = [await outbox.next() for _ in range(4)]
    first, rest, change, last = items
    assert isinstance(first, Chunk)
    assert (first.index, len(first.tokens)) == (0, MAX_CHUNK_TOKENS)
    assert first.from_draft[:3] == (False, True, False)
    assert first.text_ends[:3] == (2, 4, 6)
    assert isinstance(rest, Chunk)
    assert (rest.index, len(rest.tokens)) == (MAX_CHUNK_TOKENS, 2)
    assert change == NumericsChanged(MAX_CHUNK_TOKENS + 2, "b")
    assert isinstance(last, Chunk)
    assert (last.index, len(last.tokens)) == (MAX_CHUNK_TOKENS + 2, 3)
    outbox.close()
