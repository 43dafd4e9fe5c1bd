"""The point at which a stream is resumed, and the check of what its client has seen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import grpc
import pytest

from galley.client.errors import DeadlineExceededError, GalleyRpcError, UnavailableError
from galley.client.options import Retries
from galley.client.result import Output
from galley.client.streams import NO_RETRIES, AsyncStream, Gateways, Recovery, ResumePoint
from galley.core.content import prefix_hash
from galley.pb.galley.v1 import galley_pb2 as pb


class Broken(grpc.aio.AioRpcError):
    def __init__(self, code: grpc.StatusCode) -> None:
        super().__init__(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "away")


async def chunk_then_break(
    *chunks: tuple[int, list[int]], code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
) -> AsyncIterator[pb.ResumeResponse]:
    for index, tokens in chunks:
        yield pb.ResumeResponse(event=pb.StreamEvent(chunk=pb.Chunk(index=index, token_ids=tokens)))
    raise Broken(code)


GIVEN = ResumePoint("5e" * 16, 2, b"h" * 16)


@pytest.mark.parametrize(
    ("chunks", "seen", "resumed_at"),
    [
        ((), [], GIVEN),
        (((2, [7]),), [], ResumePoint(GIVEN.session_id, 3, b"")),
        (((2, [7]),), [5, 6], ResumePoint(GIVEN.session_id, 3, prefix_hash([5, 6, 7]))),
    ],
    ids=["before a token", "earlier tokens unknown", "all tokens known"],
)
async def test_a_repeated_resume_checks_what_is_known(
    chunks: tuple[tuple[int, list[int]], ...], seen: list[int], resumed_at: ResumePoint
) -> None:
    stream = AsyncStream(cast("Any", chunk_then_break(*chunks)), GIVEN, Output(tokens=seen))
    with pytest.raises(GalleyRpcError):
        async for _ in stream:
            pass
    assert stream.resume_from() == resumed_at


@pytest.mark.parametrize(
    ("code", "chunks", "next_gateway"),
    [
        (grpc.StatusCode.DEADLINE_EXCEEDED, (), 1),
        (grpc.StatusCode.DEADLINE_EXCEEDED, ((2, [7]),), 0),
        (grpc.StatusCode.UNAVAILABLE, (), 1),
        (grpc.StatusCode.UNAVAILABLE, ((2, [7]),), 1),
        (grpc.StatusCode.NOT_FOUND, (), 0),
    ],
)
async def test_a_gateway_that_failed_is_left_although_its_error_is_raised(
    code: grpc.StatusCode, chunks: tuple[tuple[int, list[int]], ...], next_gateway: int
) -> None:
    call, gateways = cast("Any", chunk_then_break(*chunks, code=code)), Gateways(2)
    recovery = Recovery(NO_RETRIES, None, lambda *_: call, gateways, None)
    stream = AsyncStream(call, GIVEN, recovery=recovery)
    with pytest.raises(GalleyRpcError) as caught:
        await stream.result()
    assert caught.value.code is code
    assert gateways.current == next_gateway


RARELY = Retries(patience_s=1000.0, first_pause_s=120.0, longest_pause_s=120.0)


async def test_a_break_too_late_for_another_attempt_is_a_passed_deadline() -> None:
    with pytest.raises(DeadlineExceededError, match="UNAVAILABLE: away") as caught:
        await _broken(RARELY, timeout_s=50.0).result()
    assert caught.value.session_id == GIVEN.session_id
    assert isinstance(caught.value.__cause__, UnavailableError)


@pytest.mark.parametrize(
    ("retries", "code"),
    [
        (replace(RARELY, patience_s=10.0), grpc.StatusCode.UNAVAILABLE),
        (NO_RETRIES, grpc.StatusCode.UNAVAILABLE),
        (RARELY, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
    ids=["patience ends first", "no retries", "a refusal says when to come back"],
)
async def test_another_error_than_the_deadline_is_raised_as_it_came(
    retries: Retries, code: grpc.StatusCode
) -> None:
    with pytest.raises(GalleyRpcError) as caught:
        await _broken(retries, timeout_s=50.0, code=code).result()
    assert (caught.value.code, caught.value.message) == (code, "away")


class Silent(AsyncIterator[pb.ResumeResponse]):
    """A call that sends nothing; as in gRPC, a reader that is cancelled ends it."""

    def __init__(self) -> None:
        self._is_over = False

    async def __anext__(self) -> pb.ResumeResponse:
        if self._is_over:
            raise StopAsyncIteration
        self._is_over = True
        await asyncio.Event().wait()
        raise AssertionError


async def test_a_reader_that_gave_up_before_the_deadline_leaves_no_gateway() -> None:
    resumed: list[ResumePoint] = []
    gateways = Gateways(2)
    recovery = Recovery(RARELY, None, lambda point, _: cast("Any", resumed.append(point)), gateways, 0.0)
    stream = AsyncStream(cast("Any", Silent()), GIVEN, recovery=recovery)
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)  # it reads now
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    for _ in range(2):
        with pytest.raises(DeadlineExceededError) as caught:
            await anext(stream)
        assert caught.value.session_id == GIVEN.session_id
    assert (gateways.current, resumed) == (0, [])


async def test_a_reader_that_gives_up_again_and_again_calls_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def noted(delay_s: float) -> None:
        pauses.append(delay_s)

    retries = Retries(patience_s=600.0, first_pause_s=10.0, longest_pause_s=40.0)
    recovery = Recovery(retries, None, lambda *_: cast("Any", Silent()), Gateways(1), None)
    stream = AsyncStream(cast("Any", Silent()), GIVEN, recovery=recovery)
    monkeypatch.setattr("galley.client.streams.asyncio.sleep", noted)
    for _ in range(3):
        await recovery.call_again(stream)
    assert pauses[0] < 0, "the first call begins at once"
    assert 4.0 < pauses[1] <= 10.0
    assert 9.0 < pauses[2] <= 20.0


def _broken(
    retries: Retries, timeout_s: float, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
) -> AsyncStream:
    call = cast("Any", chunk_then_break(code=code))
    return AsyncStream(call, GIVEN, recovery=Recovery(retries, None, lambda *_: call, Gateways(1), timeout_s))
