"""Credit and hints over a real stream: one item, many results, the same tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from galley.core.content import prefix_hash
from galley.core.hints import MAX_HINT_TOKENS
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from services.target.engine.protocol import Limits
from tests.fakes.tiny_model import VOCAB, greedy
from tests.fakes.verify_items import Stream, extension, slice_of, stream_of, tokens_of, verify
from tests.integration.services.target.conftest import Recording, Served

PROMPT = [5, 9, 2, 33, 17]
COUNT = 24
THIS = pb.ItemRef(session_id="s", request_id=7)


@pytest.fixture(scope="session")
def answer(tiny: Path) -> list[int]:
    return greedy(tiny, PROMPT, COUNT)


def item(credit: int, draft: list[int] | None = None, **given: Any) -> pb.VerifyItem:
    return pb.VerifyItem(slice=slice_of(PROMPT, **given), draft_tokens=draft or [], credit=credit)


@asynccontextmanager
async def first_pass_held(
    target: rpc.TargetAsyncStub, engine: Recording, *items: pb.VerifyItem
) -> AsyncIterator[Stream]:
    engine.gate.clear()
    async with stream_of(target) as stream:
        await stream.send(*items)
        await started(engine)
        yield stream


async def started(engine: Recording) -> None:
    assert await asyncio.to_thread(engine.started.acquire, timeout=10)


async def test_it_goes_on_until_its_credit_is_used_up(target: rpc.TargetAsyncStub, answer: list[int]) -> None:
    async with stream_of(target) as stream:
        await stream.send(item(credit=9))
        answers = await stream.until_last()
    assert tokens_of(answers) == answer[:10]
    assert [one.result.position for one in answers] == list(range(5, 15))
    assert {one.request_id for one in answers} == {7}
    assert [one.result.kv_len for one in answers] == list(range(5, 15))
    assert all(one.result.timing.compute_ns > 0 for one in answers)


async def test_it_ends_at_a_stop_token_and_at_max_position(
    target: rpc.TargetAsyncStub, answer: list[int]
) -> None:
    end = answer.index(answer[6]) + 1
    async with stream_of(target) as stream:
        await stream.send(item(credit=20, stop_token_ids=[answer[6]]))
        assert tokens_of(await stream.until_last()) == answer[:end]
        await stream.send(item(credit=20, max_position=len(PROMPT) + 4))
        assert tokens_of(await stream.until_last()) == answer[:4]


async def test_credit_means_nothing_to_a_unary_call(target: rpc.TargetAsyncStub, answer: list[int]) -> None:
    (only,) = await verify(target, item(credit=9))
    assert not only.result.more
    assert list(only.result.tokens) == answer[:1]


async def test_an_extension_raises_the_limit(
    target: rpc.TargetAsyncStub, engine: Recording, answer: list[int]
) -> None:
    async with first_pass_held(target, engine, item(credit=1)) as stream:
        await stream.send(extensions=[extension(PROMPT, limit=len(PROMPT) + 6)])
        await stream.received()
        engine.gate.set()
        answers = await stream.until_last()
        await stream.send(extensions=[extension(PROMPT, limit=len(PROMPT) + 9)])
        await stream.send(item(credit=0, request_id=8))
        assert (await stream.next()).request_id == 8
    assert tokens_of(answers) == answer[:6]


@pytest.mark.parametrize("late", [0, 1, 3])
async def test_a_hint_keeps_its_worth_when_it_comes_late(
    target: rpc.TargetAsyncStub, engine: Recording, answer: list[int], late: int
) -> None:
    known = [*PROMPT, *answer[: 3 - late]]
    async with stream_of(target) as stream:
        await stream.send(item(credit=0))
        await stream.until_last()
        engine.gate.clear()
        while engine.started.acquire(blocking=False):
            pass
        tokens = [*PROMPT, *answer[:2]]
        await stream.send(pb.VerifyItem(slice=slice_of(tokens), credit=20))
        await started(engine)
        await stream.send(extensions=[extension(known, answer[3 - late : 7])])
        await stream.received()
        engine.gate.set()
        first, second = await stream.next(), await stream.next()
    assert list(first.result.tokens) == answer[2:3]
    assert (second.result.verified, second.result.accepted) == (4, 4)
    assert list(second.result.tokens) == answer[3:8]


@pytest.mark.parametrize(("limits", "most"), [(Limits(max_draft_tokens=most), most) for most in (0, 2)])
async def test_hints_are_bound_as_requests_are(
    target: rpc.TargetAsyncStub, engine: Recording, answer: list[int], most: int
) -> None:
    async with first_pass_held(target, engine, item(credit=9)) as stream:
        await stream.send(extensions=[extension([*PROMPT, answer[0]], answer[1:7])])
        await stream.received()
        engine.gate.set()
        answers = await stream.until_last()
    assert tokens_of(answers) == answer[:10]
    assert max(one.result.verified for one in answers) == most


async def test_a_hint_of_other_content_is_not_used(
    target: rpc.TargetAsyncStub, engine: Recording, answer: list[int]
) -> None:
    async with first_pass_held(target, engine, item(credit=5)) as stream:
        other = extension([*PROMPT[:4], 3, answer[0]], answer[1:5])
        await stream.send(extensions=[other])
        await stream.received()
        engine.gate.set()
        answers = await stream.until_last()
    assert [one.result.verified for one in answers] == [0] * 6
    assert tokens_of(answers) == answer[:6]


BAD = [
    ("hint.draft_tokens", extension(PROMPT, [1] * (MAX_HINT_TOKENS + 1))),
    ("hint.draft_tokens[1]", extension(PROMPT, [1, VOCAB])),
    ("hint.prefix_hash", pb.Extension(session_id="s", request_id=7, hint=pb.Hint(position=5))),
]


@pytest.mark.parametrize(("field", "bad"), BAD, ids=[field for field, _ in BAD])
async def test_a_bad_extension_closes_its_item_alone(
    target: rpc.TargetAsyncStub, engine: Recording, answer: list[int], field: str, bad: pb.Extension
) -> None:
    async with first_pass_held(target, engine, item(credit=100), item(credit=2, session_id="well")) as stream:
        await stream.send(extensions=[bad])
        refused = await stream.next()
        assert refused.session_id == "s"
        assert refused.status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert refused.status.message.startswith(f"{field}: ")
        engine.gate.set()
        answers = await stream.until_last()
    assert {one.session_id for one in answers} == {"well"}
    assert tokens_of(answers) == answer[:3]


async def test_newer_request_supersedes_one_on_credit(
    target: rpc.TargetAsyncStub, engine: Recording, answer: list[int]
) -> None:
    async with first_pass_held(target, engine, item(credit=50)) as stream:
        await stream.send(item(credit=1, request_id=8))
        await stream.received()
        engine.gate.set()
        first, over = await stream.next(), await stream.next()
        answers = await stream.until_last()
    assert list(first.result.tokens) == answer[:1]
    assert over.superseded.position == len(PROMPT) + 1
    assert over.superseded.prefix_hash == prefix_hash([*PROMPT, answer[0]])
    assert {one.request_id for one in answers} == {8}
    assert tokens_of(answers) == answer[:2]


async def test_cancelled_request_ends_and_keeps_its_cache(
    target: rpc.TargetAsyncStub, engine: Recording, answer: list[int]
) -> None:
    async with stream_of(target) as stream:
        await stream.send(item(credit=150))
        await stream.next()
        await stream.send(cancelled=[THIS])
        await idle(target)
        # A step that was under way at the cancellation has ended before this one's.
        await verify(target, pb.VerifyItem(slice=slice_of(PROMPT, session_id="t")))
        passes = len(engine.passes)
        tokens = [*PROMPT, answer[0]]
        (after,) = await verify(target, pb.VerifyItem(slice=slice_of(tokens, start=5)))
    assert list(after.result.tokens) == answer[1:2]
    assert len(engine.passes) == passes + 1


async def test_a_client_that_vanishes_takes_its_items_along(
    target: rpc.TargetAsyncStub, engine: Recording, answer: list[int]
) -> None:
    async with first_pass_held(target, engine, item(credit=150)):
        pass
    staying = asyncio.ensure_future(verify(target, pb.VerifyItem(slice=slice_of(PROMPT, session_id="t"))))
    await target.GetTargetInfo(pb.GetTargetInfoRequest())
    engine.gate.set()
    assert list((await staying)[0].result.tokens) == answer[:1]
    await idle(target)
    assert (await info(target)).kv_blocks_free == (await info(target)).kv_blocks_total


async def test_a_failed_pass_costs_its_sessions_that_pass_and_no_more(
    target: rpc.TargetAsyncStub, engine: Recording, answer: list[int]
) -> None:
    await verify(target, item(credit=0))
    engine.failure = RuntimeError("the device is gone")
    tokens = [*PROMPT, answer[0]]
    again = pb.VerifyItem(slice=slice_of(tokens, start=5))
    (failed,) = await verify(target, again)
    assert failed.status.code == grpc.StatusCode.UNAVAILABLE.value[0]
    (retried,) = await verify(target, again)
    assert list(retried.result.tokens) == answer[1:2]


class Panic(BaseException):
    """As pyo3 raises where a library panics."""


@pytest.mark.parametrize(("missing", "failure"), [(1, None), (0, Panic("out of range"))])
async def test_scheduler_error_fails_open_requests_and_replica_continues(
    target: rpc.TargetAsyncStub,
    engine: Recording,
    answer: list[int],
    missing: int,
    failure: BaseException | None,
) -> None:
    engine.missing, engine.failure = missing, failure
    async with first_pass_held(target, engine, item(credit=5)) as stream:
        engine.gate.set()
        (failed,) = await stream.until_last()
        assert failed.status.code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert (await info(target)).kv_blocks_free == (await info(target)).kv_blocks_total
        await stream.send(item(credit=5))
        assert tokens_of(await stream.until_last()) == answer[:6]


async def test_draining_closes_credit_and_refuses_the_rest(
    target: rpc.TargetAsyncStub, engine: Recording, service: Served, answer: list[int]
) -> None:
    async with first_pass_held(target, engine, item(credit=150)) as stream:
        draining = asyncio.ensure_future(service.running.service.drain())
        await target.GetTargetInfo(pb.GetTargetInfoRequest())
        (refused,) = await verify(target, item(credit=0, session_id="t"))
        assert refused.status.code == grpc.StatusCode.UNAVAILABLE.value[0]
        engine.gate.set()
        answers = await stream.until_last()
        await draining
        assert tokens_of(answers) == answer[:1]
        assert await stream.call.code() is grpc.StatusCode.UNAVAILABLE


async def info(target: rpc.TargetAsyncStub) -> pb.GetTargetInfoResponse:
    return await target.GetTargetInfo(pb.GetTargetInfoRequest())


async def idle(target: rpc.TargetAsyncStub) -> None:
    async with asyncio.timeout(10):
        while (await info(target)).queue_depth:
            pass
