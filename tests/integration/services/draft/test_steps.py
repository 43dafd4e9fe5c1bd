"""Continuous batching: items join at the next step, end by themselves, and harm no other."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from galley.core.content import prefix_hash
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.tiny_model import greedy
from tests.integration.services.draft.steps import gating, item

PROMPTS = {"a": [5, 9, 2, 33, 17], "b": [3, 2, 8, 7], "c": [40, 41], "d": [60, 61, 62], "e": [7]}


def status(answer: pb.ProposeAnswer) -> grpc.StatusCode:
    return next(code for code in grpc.StatusCode if code.value[0] == answer.status.code)


async def test_a_short_item_joins_a_long_one_and_is_answered_before_it(tiny: Path) -> None:
    async with gating(tiny) as (gated, stream, _):
        await stream.send(item(PROMPTS["a"], 5, "a"))
        await gated.step_started()
        await stream.send(item(PROMPTS["b"], 1, "b"))
        await gated.pass_on()
        await gated.pass_on()
        short = await stream.next()
        # The third step is under way, and waits.
        assert gated.steps == ["a", "ab", "a"]
        gated.open()
        long = await stream.next()
    assert gated.steps == ["a", "ab", "a", "a", "a"]
    assert (short.session_id, long.session_id) == ("b", "a")
    assert list(short.result.draft_tokens) == greedy(tiny, PROMPTS["b"], 1)
    assert list(long.result.draft_tokens) == greedy(tiny, PROMPTS["a"], 5)
    assert long.result.timing.compute_ns > short.result.timing.compute_ns > 0
    assert short.result.timing.queue_ns > 0


async def test_of_more_than_a_step_takes_the_oldest_go_first(tiny: Path) -> None:
    async with gating(tiny, max_batch=2) as (gated, stream, _):
        await stream.send(item(PROMPTS["a"], 1, "a"))
        await gated.step_started()
        await stream.send(
            *(item(PROMPTS[name], k, name) for name, k in (("b", 2), ("c", 3), ("d", 1), ("e", 1)))
        )
        gated.open()
        order = [(await stream.next()).session_id for _ in range(5)]
    assert gated.steps == ["a", "bc", "bc", "cd", "e"]
    assert order == ["a", "b", "c", "d", "e"]


async def test_a_newer_item_of_a_session_overtakes(tiny: Path) -> None:
    answer = greedy(tiny, PROMPTS["a"], 6)
    newer = [*PROMPTS["a"], answer[0], answer[1] + 1]
    async with gating(tiny) as (gated, stream, draft):
        await stream.send(item(PROMPTS["a"], 6, "a"))
        await gated.step_started()
        await gated.pass_on()
        await stream.send(item(newer, 2, "a", start=5))
        await gated.pass_on()
        old = await stream.next()
        gated.open()
        new = await stream.next()
    assert (old.superseded.position, old.superseded.prefix_hash) == (5, prefix_hash(PROMPTS["a"]))
    assert list(new.result.draft_tokens) == greedy(tiny, newer, 2)
    assert (draft.loop.drafted, draft.loop.wasted) == (4, 2)


async def test_of_two_that_wait_for_the_same_step_the_newer_counts(tiny: Path) -> None:
    async with gating(tiny) as (gated, stream, _):
        await stream.send(item(PROMPTS["b"], 1, "b"))
        await gated.step_started()
        await stream.send(item(PROMPTS["a"], 1, "a"), item(PROMPTS["a"][:3], 1, "a"))
        gated.open()
        answers = [await stream.next() for _ in range(3)]
    assert [one.WhichOneof("outcome") for one in answers] == ["result", "superseded", "result"]
    assert list(answers[2].result.draft_tokens) == greedy(tiny, PROMPTS["a"][:3], 1)
    assert gated.steps == ["b", "a"]


async def test_cache_miss_supersedes_and_reports_what_is_held(tiny: Path) -> None:
    async with gating(tiny) as (gated, stream, _):
        await stream.send(item(PROMPTS["a"], 3, "a"))
        await gated.step_started()
        await stream.send(item([1] * 9, 3, "a", start=7))
        gated.open()
        assert (await stream.next()).HasField("superseded")
        missed = (await stream.next()).cache_miss
    assert (missed.have, missed.prefix_hash) == (5, prefix_hash(PROMPTS["a"]))


async def test_at_its_deadline_an_item_is_answered_with_what_is_ready(tiny: Path) -> None:
    async with gating(tiny) as (gated, stream, draft):
        await stream.send(item(PROMPTS["a"], 6, "a", remaining_ns=200_000_000))
        await gated.step_started()
        await gated.pass_on()
        # The second step is under way, and waits; the answer does not.
        cut = await stream.next()
        await stream.send(item(PROMPTS["b"], 1, "b"))
        gated.open()
        await stream.next()
    assert list(cut.result.draft_tokens) == greedy(tiny, PROMPTS["a"], 1)
    assert len(cut.result.survival) == 1
    assert cut.result.position == len(PROMPTS["a"])
    assert gated.steps == ["a", "a", "b"]
    assert (draft.loop.drafted, draft.loop.wasted) == (3, 1)


async def test_request_not_started_by_its_deadline_is_refused(tiny: Path) -> None:
    async with gating(tiny) as (gated, stream, _):
        await stream.send(item(PROMPTS["a"], 1, "a"))
        await gated.step_started()
        await stream.send(item(PROMPTS["b"], 1, "b", remaining_ns=1))
        late = await stream.next()
        gated.open()
        await stream.next()
    assert (late.session_id, status(late)) == ("b", grpc.StatusCode.DEADLINE_EXCEEDED)
    assert gated.steps == ["a"]


async def test_request_without_a_step_by_its_deadline_has_no_tokens(tiny: Path) -> None:
    async with gating(tiny) as (gated, stream, _):
        await stream.send(item(PROMPTS["a"], 6, "a", remaining_ns=200_000_000))
        await gated.step_started()
        cut = await stream.next()
    assert cut.HasField("result")
    assert not cut.result.draft_tokens


async def test_cancelled_draft_request_frees_its_place(tiny: Path) -> None:
    async with gating(tiny, max_sessions=1) as (gated, stream, draft):
        await stream.send(item(PROMPTS["a"], 6, "a"))
        await gated.step_started()
        await gated.pass_on()
        await stream.send(item(PROMPTS["b"], 1, "b"))
        await gated.pass_on()
        busy = await stream.next()
        await stream.cancel("a")
        await stream.send(item(PROMPTS["c"], 1, "c"))
        gated.open()
        served = await stream.next()
    assert status(busy) == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert list(served.result.draft_tokens) == greedy(tiny, PROMPTS["c"], 1)
    assert gated.steps == ["a", "a", "a", "c"]
    assert (draft.loop.drafted, draft.loop.wasted) == (4, 3)


async def test_too_many_waiting_are_refused(tiny: Path) -> None:
    async with gating(tiny, max_waiting=2) as (gated, stream, _):
        await stream.send(item(PROMPTS["a"], 1, "a"))
        await gated.step_started()
        await stream.send(*(item(PROMPTS[name], 1, name) for name in "bc"))
        refused = await stream.next()
        gated.open()
        served = {(await stream.next()).session_id for _ in range(2)}
    assert (refused.session_id, status(refused)) == ("c", grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert served == {"a", "b"}


async def test_a_session_beyond_all_memory_is_the_callers_fault(tiny: Path) -> None:
    """A retry would not help, and another draft of the pool has no more."""
    async with gating(tiny, max_tokens=len(PROMPTS["a"])) as (gated, stream, _):
        gated.open()
        await stream.send(item(PROMPTS["a"], 1, "a"))
        refused = await stream.next()
    assert status(refused) == grpc.StatusCode.INVALID_ARGUMENT
    assert "--max-kv-tokens" in refused.status.message


class Panic(BaseException):
    """As pyo3 raises where a library panics."""


@pytest.mark.parametrize("failure", [ValueError("secret"), Panic("secret")])
async def test_a_step_that_fails_fails_its_items_alone(tiny: Path, failure: BaseException) -> None:
    async with gating(tiny) as (gated, stream, _):
        gated.failure = failure
        await stream.send(item(PROMPTS["a"], 2, "a"))
        await gated.step_started()
        gated.open()
        failed = await stream.next()
        gated.failure = None
        await stream.send(item(PROMPTS["a"], 2, "a"))
        served = await stream.next()
    assert status(failed) == grpc.StatusCode.INTERNAL
    assert "secret" not in failed.status.message
    assert list(served.result.draft_tokens) == greedy(tiny, PROMPTS["a"], 2)


async def test_long_prompt_does_not_delay_other_sessions(tiny: Path) -> None:
    prompt = [2 + i % 90 for i in range(150)]
    async with gating(tiny) as (gated, stream, _):
        await stream.send(item(prompt, 1, "a"), item(PROMPTS["b"], 1, "b"))
        await gated.step_started()
        await gated.pass_on()
        short = await stream.next()
        assert gated.steps == ["ab", "a"]
        gated.open()
        long = await stream.next()
    assert list(short.result.draft_tokens) == greedy(tiny, PROMPTS["b"], 1)
    assert list(long.result.draft_tokens) == greedy(tiny, prompt, 1)


async def test_a_draft_that_drains_answers_what_is_here(tiny: Path) -> None:
    async with gating(tiny) as (gated, stream, draft):
        await stream.send(item(PROMPTS["a"], 2, "a"))
        await gated.step_started()
        draining = asyncio.ensure_future(draft.service.drain())
        await asyncio.sleep(0)
        (refused,) = (await draft.stub.Propose(pb.ProposeRequest(items=[item(PROMPTS["b"], 1, "b")]))).answers
        assert status(refused) == grpc.StatusCode.UNAVAILABLE
        assert not draining.done()
        gated.open()
        await draining
        assert list((await stream.next()).result.draft_tokens) == greedy(tiny, PROMPTS["a"], 2)


async def test_a_draft_that_is_closed_leaves_no_one_waiting(tiny: Path) -> None:
    async with gating(tiny) as (gated, stream, draft):
        await stream.send(item(PROMPTS["a"], 2, "a"))
        await gated.step_started()
        closing = asyncio.ensure_future(draft.service.close())
        gated.open()
        await closing
        assert status(await stream.next()) == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("ahead", [5, 6])
async def test_some_token_must_be_confirmed(tiny: Path, ahead: int) -> None:
    async with gating(tiny) as (gated, stream, _):
        gated.open()
        await stream.send(item(PROMPTS["a"], 1, "a", ahead=ahead), item(PROMPTS["a"], 1, "b", ahead=4))
        answers = [await stream.next() for _ in range(2)]
    refused, served = sorted(answers, key=lambda one: one.session_id)
    assert refused.status.message == f"ahead: must be < 5 (all tokens), got {ahead}"
    assert list(served.result.draft_tokens) == greedy(tiny, PROMPTS["a"], 1)
