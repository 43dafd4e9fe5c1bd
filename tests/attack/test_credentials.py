"""Calls without a valid key, and calls with a valid key for sessions of another principal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from redis import asyncio as redis_asyncio

from galley.client.client import NO_RETRIES, AsyncClient, AsyncStream
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.attack import storms
from tests.attack.bystander import GOOD
from tests.attack.stack import BAD, EXPIRED, Attacked, hello, unharmed
from tests.attack.storms import NOBODY, UNAUTHENTICATED, Metadata
from tests.fakes.waiting import PATIENCE_S

UNKNOWN = "0" * 32


@dataclass(frozen=True)
class End:
    code: grpc.StatusCode
    details: str
    initial: Any
    trailing: Any
    answers: int

    def about(self, name: str, other: str) -> End:
        renamed = {
            key: value.replace(name.encode(), other.encode()) if isinstance(value, bytes) else value
            for key, value in self.trailing
        }
        details = self.details.replace(name, other)
        return End(self.code, details, self.initial, tuple(renamed.items()), self.answers)


async def end_of(channel: grpc.aio.Channel, method: str, request: Message, metadata: Metadata) -> End:
    is_stream = method in {"Generate", "Resume"}
    kind: Any = channel.unary_stream if is_stream else channel.unary_unary
    call = kind(f"/galley.v1.Generation/{method}")(request.SerializeToString(), metadata=metadata)
    answers = 0
    async with asyncio.timeout(PATIENCE_S):
        try:
            if is_stream:
                async for _ in call:
                    answers += 1
            else:
                await call
                answers = 1
        except grpc.RpcError:
            pass
        return End(
            await call.code(),
            await call.details(),
            tuple(await call.initial_metadata()),
            tuple(await call.trailing_metadata() or ()),
            answers,
        )


@pytest.fixture
async def channel(stack: Attacked) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(stack.gateway) as channel:
        yield channel


def calls() -> Sequence[tuple[str, Message]]:
    return (
        ("Generate", hello()),
        ("Resume", pb.ResumeRequest(session_id=UNKNOWN)),
        ("Abort", pb.AbortRequest(session_id=UNKNOWN)),
        ("Audit", pb.AuditRequest(session_id=UNKNOWN)),
        ("GetAuditCounts", pb.GetAuditCountsRequest()),
        ("GetModelInfo", pb.GetModelInfoRequest()),
    )


@asynccontextmanager
async def store(stack: Attacked) -> AsyncIterator[redis_asyncio.Redis]:
    async with redis_asyncio.Redis.from_url(stack.store) as client:
        yield client


async def commands(client: redis_asyncio.Redis) -> int:
    stats = await client.info("commandstats")
    return sum(int(entry["calls"]) for name, entry in stats.items() if name != "cmdstat_info")


async def test_unauthenticated_calls_are_refused_before_any_work(
    stack: Attacked, channel: grpc.aio.Channel
) -> None:
    async with unharmed(stack):
        pass
    async with store(stack) as client:
        before = await commands(client)
        for metadata in UNAUTHENTICATED.values():
            for method, request in calls():
                end = await end_of(channel, method, request, metadata)
                assert (end.code, end.answers) == (grpc.StatusCode.UNAUTHENTICATED, 0)
                assert end.initial == ()
                output = f"{end.details} {end.trailing}"
                assert not [key for key in (GOOD, BAD, EXPIRED, NOBODY) if key in output]
        assert await commands(client) == before


async def test_bad_and_repeated_credentials_block_no_other(stack: Attacked) -> None:
    async with unharmed(stack):
        ends = await storms.bad_credentials(stack.gateway, rounds=10)
    assert ends == {"UNAUTHENTICATED": 10 * len(UNAUTHENTICATED)}


async def test_no_key_is_let_in_that_differs_in_a_single_character(channel: grpc.aio.Channel) -> None:
    for index in range(len(GOOD)):
        for other in ("0", "z", "-"):
            if other != GOOD[index]:
                wrong = GOOD[:index] + other + GOOD[index + 1 :]
                end = await end_of(channel, "GetModelInfo", pb.GetModelInfoRequest(), (("x-api-key", wrong),))
                assert end.code is grpc.StatusCode.UNAUTHENTICATED
    end = await end_of(channel, "GetModelInfo", pb.GetModelInfoRequest(), (("x-api-key", GOOD),))
    assert end.code is grpc.StatusCode.OK


@asynccontextmanager
async def foreign_stream(stack: Attacked, tokens: int) -> AsyncIterator[AsyncStream]:
    async with AsyncClient(stack.gateway, api_key=GOOD, retries=NO_RETRIES) as client:
        stream = client.stream("a secret", max_tokens=tokens, ignore_eos=True)
        async for event in stream:
            if event.chunk.token_ids:
                break
        yield stream


@pytest.mark.parametrize("live", [True, False], ids=["under way", "finished"])
async def test_session_of_another_principal_is_answered_as_unknown(
    stack: Attacked, channel: grpc.aio.Channel, live: bool
) -> None:
    async with foreign_stream(stack, 600 if live else 1) as stream:
        if not live:
            assert [event async for event in stream][-1].HasField("finished")
        theirs = stream.session_id
        kinds = {"Resume": pb.ResumeRequest, "Abort": pb.AbortRequest, "Audit": pb.AuditRequest}
        for method, kind in kinds.items():
            foreign, unknown = [
                await end_of(channel, method, kind(session_id=session_id), (("x-api-key", BAD),))
                for session_id in (theirs, UNKNOWN)
            ]
            assert (foreign.code, foreign.answers) == (grpc.StatusCode.NOT_FOUND, 0)
            assert foreign.about(theirs, UNKNOWN) == unknown
        if live:
            assert (await anext(stream)).chunk.token_ids, "it goes on"
