"""Valid HTTP requests in numbers that no honest caller needs. `make prove-attacks` is the long form."""

from __future__ import annotations

from tests.attack.http import storms
from tests.attack.stack import (
    BAD,
    HTTP,
    MAX_MESSAGE_BYTES,
    MAX_SESSIONS,
    METERED_BURST,
    METERED_TOKENS_PER_S,
    Attacked,
    unharmed,
)
from tests.fakes.http_client import BODY, http_client


async def test_replays_of_a_long_answer_block_no_other(stack: Attacked) -> None:
    async with unharmed(stack, HTTP):
        # Half of the slots: those of the round before may not be free yet.
        ends = await storms.replays(stack.http, tokens=400, at_once=MAX_SESSIONS // 2, rounds=4)
    assert ends["done"] >= 4, "the last one of each round is not superseded"
    assert ends.keys() <= storms.REPLAYED


async def test_forged_event_ids_are_refused(stack: Attacked) -> None:
    async with unharmed(stack, HTTP):
        ends = await storms.forged_ids(stack.http, rounds=2)
    assert ends.keys() == storms.FORGED


async def test_resumes_that_supersede_one_another_block_no_other(stack: Attacked) -> None:
    async with unharmed(stack, HTTP):
        ends = await storms.resumes(stack.http, at_once=MAX_SESSIONS // 4, rounds=3)
    assert ends[200] >= MAX_SESSIONS // 4
    assert ends.keys() <= storms.RESUMED


async def test_streams_beyond_a_principals_own_are_refused(stack: Attacked) -> None:
    async with unharmed(stack, HTTP):
        ends = await storms.resumes(stack.http, at_once=3 * MAX_SESSIONS, rounds=1)
    assert ends[200] >= MAX_SESSIONS
    assert ends[429] >= 2 * MAX_SESSIONS
    assert ends.keys() <= storms.RESUMED


async def test_each_choice_takes_a_slot(stack: Attacked) -> None:
    async with unharmed(stack, HTTP), http_client(stack.http, x_api_key=BAD) as client:
        prompts = ["Go on."] * (MAX_SESSIONS // 8 + 1)
        refused = await client.post(storms.COMPLETIONS, BODY | {"prompt": prompts, "n": 8})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_argument")
        assert refused.json()["error"]["param"] == "prompt", "it could never be served"
        served = await client.post(storms.COMPLETIONS, BODY | {"prompt": prompts[1:], "n": 8})
        assert len(served.json()["choices"]) == MAX_SESSIONS


async def test_cancels_and_resumes_give_no_more_tokens_than_the_rate(stack: Attacked) -> None:
    async with unharmed(stack, HTTP):
        delivered, took_s = await storms.cancels(stack.http, sessions=40, tokens=METERED_BURST // 2)
    assert delivered >= METERED_BURST // 2, "one session is answered"
    assert delivered <= METERED_BURST + METERED_TOKENS_PER_S * took_s


async def test_reads_and_ends_of_a_session_block_no_other(stack: Attacked) -> None:
    async with unharmed(stack, HTTP):
        ends = await storms.reads(stack.http, tokens=300, at_once=10)
    assert ends[200] >= MAX_SESSIONS
    assert ends.keys() <= {200, 429}


async def test_logprobs_of_long_answers_block_no_other(stack: Attacked) -> None:
    async with unharmed(stack, HTTP, most_held_s=0.08):  # encoded in one turn they held it for 0.15 s
        ends = await storms.logprobs(stack.http, tokens=400, at_once=1)
    assert ends == {200: 6}


async def test_texts_beyond_the_context_are_refused_and_block_no_other(stack: Attacked) -> None:
    async with unharmed(stack, HTTP):
        ends = await storms.texts(stack.http, MAX_MESSAGE_BYTES - 1024, 4)
    assert ends[400]
    assert ends.keys() <= {200, 400, 429}
