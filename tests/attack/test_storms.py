"""Valid calls in numbers and sizes that no honest caller needs. `make prove-attacks` is the long form."""

from __future__ import annotations

from tests.attack import storms
from tests.attack.stack import MAX_SESSIONS, METERED_BURST, METERED_TOKENS_PER_S, Attacked, unharmed


async def test_replays_of_a_long_answer_block_no_other(stack: Attacked) -> None:
    async with unharmed(stack):
        ends = await storms.replays(stack.gateway, tokens=400, at_once=MAX_SESSIONS // 2, rounds=2)
    assert ends["OK"] >= 2, "the last one of each round is not superseded"
    assert ends.keys() <= {"OK", "FAILED_PRECONDITION", "UNAVAILABLE"}


async def test_crafted_stop_strings_block_no_other(stack: Attacked) -> None:
    async with unharmed(stack):
        ends = await storms.crafted_stops(stack.gateway, tokens=100, at_once=MAX_SESSIONS, rounds=1)
    assert ends == {"OK": MAX_SESSIONS}


async def test_texts_beyond_the_context_are_refused_and_block_no_other(stack: Attacked) -> None:
    async with unharmed(stack):
        for name in storms.TEXTS:
            assert await storms.tokenizer_bomb(stack.gateway, name, 8) == {"INVALID_ARGUMENT": 8}


async def test_streams_beyond_a_principals_own_are_refused(stack: Attacked) -> None:
    async with unharmed(stack):
        ends = await storms.resumes(stack.gateway, at_once=3 * MAX_SESSIONS, rounds=1)
    assert ends["OK"] >= MAX_SESSIONS
    assert ends["RESOURCE_EXHAUSTED"] >= 2 * MAX_SESSIONS
    assert ends.keys() <= {"OK", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "UNAVAILABLE"}


async def test_resumes_that_supersede_one_another_block_no_other(stack: Attacked) -> None:
    async with unharmed(stack):
        ends = await storms.resumes(stack.gateway, at_once=MAX_SESSIONS // 4, rounds=3)
    assert ends["OK"] >= MAX_SESSIONS // 4
    assert ends.keys() <= {"OK", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "UNAVAILABLE"}


async def test_cancels_and_resumes_give_no_more_tokens_than_the_rate(stack: Attacked) -> None:
    async with unharmed(stack):
        delivered, took_s = await storms.cancels(stack.gateway, sessions=50, tokens=METERED_BURST // 2)
    assert delivered >= METERED_BURST // 2, "one session is answered"
    assert delivered <= METERED_BURST + METERED_TOKENS_PER_S * took_s


async def test_changed_logs_end_their_own_streams_only(stack: Attacked) -> None:
    async with unharmed(stack):
        ends = await storms.changed_logs(stack.gateway, stack.store, tokens=200)
    assert ends["DATA_LOSS"]
    assert ends.keys() <= storms.ENDS_OF_CHANGED_LOGS
