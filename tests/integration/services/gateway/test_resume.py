"""A stream that is cut off goes on elsewhere: nothing lost, nothing twice, nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from redis.asyncio import Redis

from galley.core.admission.attempts import ATTEMPT_KEY, Attempt
from galley.core.answer.answer import Answer
from galley.core.content import prefix_hash
from galley.core.records import TokenRecord
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from services.gateway.session.replay import SLICE_TOKENS
from tests.fakes.truth import logprobs_of, text_of
from tests.fakes.world import MAX_TOKENS, Gateway, Received, World, must_be_true, receive, refused


def summary(received: Received) -> tuple[object, ...]:
    """Return what a resumed stream has in common with an uninterrupted one; origins of tokens may differ."""
    assert len(received.from_draft) == len(received.tokens)
    return (
        received.tokens,
        received.text,
        received.logprobs,
        received.token_bytes,
        received.end.reason,
        received.end.WhichOneof("matched_stop"),
        received.end.stop,
        received.end.usage,
    )


async def cut_off(world: World, gateway: Gateway, other: Gateway, at: int, **options: Any) -> Received:
    stream = gateway.generate(logprobs=2, **options)
    received = Received()
    received.receive(await anext(stream))
    await received.listen(stream, until=at)
    stream.cancel()
    return await received.listen(other.client.resume_stream(stream))


@pytest.mark.parametrize(("spoil_rate", "credit"), [(0.0, 0), (0.3, 0), (0.3, 32)])
async def test_a_stream_resumes_at_another_gateway(world: World, spoil_rate: float, credit: int) -> None:
    world.draft.spoil_rate = spoil_rate
    first, second = await world.gateway(), await world.gateway()
    whole = await receive(first.generate(logprobs=2))
    must_be_true(whole)
    assert whole.logprobs == [logprobs_of(token, 2) for token in whole.tokens]
    assert credit or {True, False} == set(whole.from_draft)
    for at in range(0, MAX_TOKENS, 4 if credit else 1):
        received = await cut_off(world, first, second, at)
        assert summary(received) == summary(whole), at


async def test_a_stream_resumes_before_a_split_stop_string(world: World) -> None:
    first, second = await world.gateway(), await world.gateway()
    text = (await receive(first.generate())).text
    stop = text[17:24]
    whole = await receive(first.generate(logprobs=2, stop=[stop]))
    assert whole.end.stop == stop
    assert whole.text == text[: text.index(stop)]
    for at in range(0, len(whole.tokens), 2):
        received = await cut_off(world, first, second, at, stop=[stop])
        assert summary(received) == summary(whole), at


async def test_a_finished_session_is_replayed_from_any_index(world: World) -> None:
    first, second = await world.gateway(), await world.gateway()
    stream = first.generate(logprobs=1)
    whole = await receive(stream)
    calls = len(world.target.calls), len(world.draft.calls)
    for index in range(MAX_TOKENS + 1):
        seen = prefix_hash(whole.tokens[:index])
        rest = await receive(second.client.resume(stream.session_id, index, seen), first_index=index)
        assert rest.tokens == whole.tokens[index:]
        assert rest.from_draft == whole.from_draft[index:]
        assert rest.logprobs == whole.logprobs[index:]
        assert whole.text.endswith(rest.text)
        assert (rest.end.reason, rest.end.usage) == (whole.end.reason, whole.end.usage)
    assert (len(world.target.calls), len(world.draft.calls)) == calls, "nothing is computed twice"


async def test_a_long_resume_with_long_stop_strings_leaves_turns_to_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took one turn of the event loop, and 16 x 255 comparisons for each token."""
    first, second = await world.gateway(), await world.gateway()
    length, appended, most = 900, 0, 0
    stop = [" " * size + "never said" for size in range(200, 216)]
    streams = [first.generate(max_tokens=length, stop=stop) for _ in range(3)]
    whole = await asyncio.gather(*map(receive, streams))
    assert len(whole[0].tokens) == length
    append = Answer.append

    def counted(answer: Answer, token: int, record: TokenRecord) -> bool:
        nonlocal appended, most
        appended += 1
        most = max(most, appended)
        return append(answer, token, record)

    async def take_turns() -> None:
        nonlocal appended
        while True:
            appended = 0
            await asyncio.sleep(0)

    monkeypatch.setattr(Answer, "append", counted)
    turns = asyncio.create_task(take_turns())
    again = await asyncio.gather(*(receive(second.client.resume(it.session_id, 0)) for it in streams))
    turns.cancel()
    assert [received.text for received in again] == [received.text for received in whole]
    assert most == SLICE_TOKENS


async def test_the_text_does_not_depend_on_the_chunks(world: World) -> None:
    gateway = await world.gateway(draft="none")
    world.target.gate.close()
    stream = gateway.generate()
    received = Received()
    for count in range(1, MAX_TOKENS + 1):
        world.target.gate.permit()
        await received.listen(stream, until=count)
    await received.listen(stream)
    must_be_true(received)
    assert len(received.texts) == MAX_TOKENS
    assert "" in received.texts, "no character of several bytes in the answer: the test shows nothing"
    for index in range(MAX_TOKENS + 1):
        rest = await receive(gateway.client.resume(stream.session_id, index), first_index=index)
        assert rest.text == "".join(received.texts[index:])


async def test_a_session_resumes_where_its_log_ends(world: World) -> None:
    first, second = await world.gateway(), await world.gateway()
    stream, received = await world.held(first, 3)
    stream.cancel()
    await first.idle()
    resumed = second.client.resume(stream.session_id, 2, prefix_hash(received.tokens[:2]))
    known = len(received.tokens) - 2
    rest = await receive(resumed, until=known, first_index=2)
    assert rest.tokens[:known] == received.tokens[2:]
    world.target.gate.open()
    await rest.listen(resumed)
    assert [*received.tokens[:2], *rest.tokens] == (whole := await receive(first.generate())).tokens
    assert text_of(received.tokens[:2]) + rest.text == whole.text


@pytest.mark.parametrize(
    ("next_index", "seen_hash", "code"),
    [
        (10**6, b"", grpc.StatusCode.INVALID_ARGUMENT),
        (2, b"?" * 16, grpc.StatusCode.DATA_LOSS),
        (0, b"??", grpc.StatusCode.INVALID_ARGUMENT),
    ],
    ids=["beyond the answer", "another answer", "no hash"],
)
async def test_a_refused_resume_leaves_the_stream_alone(
    world: World, next_index: int, seen_hash: bytes, code: grpc.StatusCode
) -> None:
    first, second = await world.gateway(), await world.gateway()
    stream, received = await world.held(first, 3)
    error = await refused(receive(second.client.resume(stream.session_id, next_index, seen_hash)))
    assert error.code is code
    world.target.gate.open()
    must_be_true(await received.listen(stream))


@asynccontextmanager
async def resuming(gateway: Gateway, session_id: str, attempt: str) -> AsyncIterator[AsyncIterator[Any]]:
    request = pb.ResumeRequest(session_id=session_id)
    async with grpc.aio.insecure_channel(gateway.address) as channel:
        yield aiter(rpc.GenerationStub(channel).Resume(request, metadata=((ATTEMPT_KEY, attempt),)))


async def test_a_call_that_comes_late_takes_nothing_from_a_later_one_of_its_stream(world: World) -> None:
    """A cut link may hold it back until its client has gone to another gateway."""
    left, other = await world.gateway(), await world.gateway()
    stream, _ = await world.held(left, 3)
    stream.cancel()
    await left.idle()
    late, earlier, later = (str(Attempt(b"stream", number)) for number in (1, 2, 3))
    async with resuming(left, stream.session_id, earlier) as first:
        await anext(first)
        async with resuming(other, stream.session_id, later) as second:
            await anext(second)
            async with resuming(left, stream.session_id, late) as third:
                with pytest.raises(grpc.aio.AioRpcError, match="claimed by another call") as caught:
                    await anext(third)
            world.target.gate.open()
            assert [response.event async for response in second][-1].HasField("finished")
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_call_with_a_malformed_attempt_is_refused(world: World) -> None:
    gateway = await world.gateway()
    async with resuming(gateway, "00" * 16, "first") as responses:
        with pytest.raises(grpc.aio.AioRpcError, match="x-galley-attempt: must be 12 hexadecimal") as caught:
            await anext(responses)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_changed_token_ends_as_data_loss(world: World) -> None:
    first, second = await world.gateway(), await world.gateway()
    stream, _ = await world.held(first, 3)
    stream.cancel()
    await first.idle()
    world.target.gate.open()
    log = f"galley:sessions:default:{{{stream.session_id}}}:log"
    async with Redis.from_url(world.redis_url) as store:
        await store.setbit(log, 39, 1 - await store.getbit(log, 39))  # a bit of the second token
    reported = Received()
    error = await refused(reported.listen(second.client.resume(stream.session_id, 0)))
    assert error.code is grpc.StatusCode.DATA_LOSS
    assert not reported.tokens


async def test_a_session_resumes_without_drafts(world: World) -> None:
    first, second = await world.gateway(), await world.gateway(draft="none")
    stream, received = await world.held(first, 2, until=6)
    stream.cancel()
    await first.idle()
    world.target.gate.open()
    call_count = len(world.draft.calls)
    must_be_true(await received.listen(second.client.resume_stream(stream)))
    assert len(world.draft.calls) == call_count
