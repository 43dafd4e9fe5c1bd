"""Two whole targets: one is killed while it serves, and nobody hears another token for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from galley.client.client import AsyncClient, TokenStream
from galley.client.options import GenerateOptions, Message
from galley.common.redis.calls import RedisCalls
from galley.stack.stack import Stack, StackOptions

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

PROMPTS = (
    "Repeat this list twice: red, green, blue, yellow, purple, orange, brown, black.",
    "Write a haiku about the sea.",
    "Count from one to twenty in words.",
    "List the first ten prime numbers.",
)
MAX_TOKENS = 80
BEFORE_THE_KILL = 4


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with Stack(StackOptions(replicas=2)) as stack:
        yield stack


async def read(stream: TokenStream, until: int = MAX_TOKENS) -> None:
    async for _ in stream:
        if len(stream.token_ids) >= until:
            return


def ask_all(client: AsyncClient) -> list[TokenStream]:
    options = GenerateOptions(temperature=0.7, seed=5, max_tokens=MAX_TOKENS, ignore_eos=True)
    return [client.generate([Message("user", prompt)], **options) for prompt in PROMPTS]


async def told(stack: Stack, streams: list[TokenStream], field: str) -> list[str]:
    """A field of each session as the store has it; `target_replica` is the KV directory's."""
    calls = RedisCalls(f"unix://{stack.address('valkey')}", call_timeout_s=5, max_connections=1)
    try:
        found = [await calls.command("HGET", f"galley:{{{one.session_id}}}", field) for one in streams]
    finally:
        await calls.close()
    return [value.decode() for value in found if isinstance(value, bytes)]


async def test_a_target_that_is_killed_costs_its_streams_a_pause(stack: Stack) -> None:
    async with AsyncClient(stack.address("gateway")) as client:
        whole = ask_all(client)
        await asyncio.gather(*(read(stream) for stream in whole))
        cut = ask_all(client)
        await asyncio.gather(*(read(stream, until=BEFORE_THE_KILL) for stream in cut))
        homes = await told(stack, cut, "target_replica")
        doomed, other = stack.address("target"), stack.address("target-2")
        assert set(homes) == {doomed, other}, "both serve"
        states = await told(stack, cut, "state")
        await stack.kill("target")
        assert (doomed, "live") in zip(homes, states, strict=True), "it was killed while it served"
        await asyncio.gather(*(read(stream) for stream in cut))
        assert [stream.token_ids for stream in cut] == [stream.token_ids for stream in whole]
        assert set(await told(stack, cut, "target_replica")) == {other}
