"""Strangers, and those who know more than they should: no key, or the names of what is another's."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from redis import asyncio as redis_asyncio

from services.client.client import NO_RETRIES, GalleyClient
from services.common.pb.galley.v1 import galley_pb2 as pb
from tests.attack.stack import BAD, EXPIRED, GOOD, Attacked, hello, unharmed
from tests.service.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from google.protobuf.message import Message

    from services.client.client import TokenStream

UNKNOWN = "0" * 32
NOBODY = "nobody-7c19e4d2"
Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class End:
    """All that a caller learns of a call that is refused."""

    code: grpc.StatusCode
    details: str
    initial: Any
    trailing: Any
    answers: int

    def about(self, told: str, other: str) -> End:
        """The same, had it been about the other of the two names."""
        renamed = {
            key: value.replace(told.encode(), other.encode()) if isinstance(value, bytes) else value
            for key, value in self.trailing
        }
        details = self.details.replace(told, other)
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
        ("GetModelInfo", pb.GetModelInfoRequest()),
    )


@asynccontextmanager
async def store(stack: Attacked) -> AsyncIterator[redis_asyncio.Redis]:
    async with redis_asyncio.Redis.from_url(stack.store) as client:
        yield client


async def commands(client: redis_asyncio.Redis) -> int:
    """Commands that the store has carried out, but for those that ask it so."""
    stats = await client.info("commandstats")
    return sum(int(entry["calls"]) for name, entry in stats.items() if name != "cmdstat_info")


STRANGERS: dict[str, Metadata] = {
    "no key": (),
    "an empty key": (("x-api-key", ""),),
    "an empty bearer": (("authorization", "Bearer "),),
    "another scheme": (("authorization", f"Basic {GOOD}"),),
    "an unknown key": (("x-api-key", NOBODY),),
    "an expired key": (("authorization", f"Bearer {EXPIRED}"),),
    "a name instead of its key": (("x-api-key", "good"),),
    "a key that is longer": (("x-api-key", GOOD + "0"),),
    "a key that is shorter": (("x-api-key", GOOD[:-1]),),
    "a key in another case": (("x-api-key", GOOD.upper()),),
    "two keys": (("authorization", f"Bearer {GOOD},{BAD}"),),
    "a good key, and then a bad one": (("x-api-key", GOOD), ("x-api-key", NOBODY)),
    "a hash instead of its key": (
        ("x-api-key", "b8d1a7ea6f3c9b0c56e3a1c1c5b1f9f7f0a6f7a3b1e2d3c4b5a69788796a5b4c"),
    ),
    "a key of 4,000 bytes": (("x-api-key", GOOD + "x" * 4000),),
}


async def test_strangers_are_turned_away_before_anything_is_done(
    stack: Attacked, channel: grpc.aio.Channel
) -> None:
    async with unharmed(stack):
        pass
    async with store(stack) as client:
        before = await commands(client)
        for metadata in STRANGERS.values():
            for method, request in calls():
                end = await end_of(channel, method, request, metadata)
                assert (end.code, end.answers) == (grpc.StatusCode.UNAUTHENTICATED, 0)
                assert end.initial == ()
                told = f"{end.details} {end.trailing}"
                assert not [key for key in (GOOD, BAD, EXPIRED, NOBODY) if key in told]
        assert await commands(client) == before


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
async def anothers(stack: Attacked, tokens: int, key: str = "") -> AsyncIterator[TokenStream]:
    """A stream of somebody else, of which the first token is there."""
    async with GalleyClient(stack.gateway, api_key=GOOD, retries=NO_RETRIES) as client:
        stream = client.generate("a secret", max_tokens=tokens, ignore_eos=True, idempotency_key=key)
        async for event in stream:
            if event.chunk.token_ids:
                break
        yield stream


@pytest.mark.parametrize("live", [True, False], ids=["under way", "finished"])
async def test_anothers_session_is_answered_as_one_that_never_was(
    stack: Attacked, channel: grpc.aio.Channel, live: bool
) -> None:
    """In status, text and metadata to the letter, and it is looked for as long."""
    key: Metadata = (("x-api-key", BAD),)
    async with anothers(stack, 600 if live else 1) as stream, store(stack) as client:
        if not live:
            assert [event async for event in stream][-1].HasField("finished")
        theirs = stream.session_id
        for method, kind in (("Resume", pb.ResumeRequest), ("Abort", pb.AbortRequest)):
            ends, looked = [], []
            for session_id in (theirs, UNKNOWN):
                before = await commands(client)
                ends.append(await end_of(channel, method, kind(session_id=session_id), key))
                looked.append(await commands(client) - before)
            assert ends[0].code is grpc.StatusCode.NOT_FOUND
            assert ends[0].answers == 0
            assert ends[0].about(theirs, UNKNOWN) == ends[1]
            assert live or looked[0] == looked[1]
        if live:
            assert (await anext(stream)).chunk.token_ids, "it goes on"


@pytest.mark.parametrize("prompt", ["a secret", "something else"])
async def test_anothers_idempotency_key_names_nothing(stack: Attacked, prompt: str) -> None:
    """It begins a session of one's own, whatever the body, and the other's stays what it was."""
    key = f"key-{id(stack)}-{len(prompt)}"
    async with anothers(stack, 4, key) as stream, GalleyClient(stack.gateway, api_key=BAD) as client:
        mine = client.generate(prompt, max_tokens=4, ignore_eos=True, idempotency_key=key)
        assert [event async for event in mine][-1].HasField("finished")
        assert mine.session_id != stream.session_id
    async with anothers(stack, 4, key) as again:
        assert again.session_id == stream.session_id


async def test_nothing_that_was_presented_stands_in_the_log_or_in_a_trace(
    stack: Attacked, channel: grpc.aio.Channel
) -> None:
    sampled = ("traceparent", "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01")
    for metadata in STRANGERS.values():
        for method, request in calls():
            await end_of(channel, method, request, (*metadata, sampled))
    log = stack.log.read_text() + stack.traces.read_text()
    for presented in (GOOD, BAD, EXPIRED, NOBODY):
        assert presented not in log
