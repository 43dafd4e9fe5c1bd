"""Slow loris over HTTP: requests that never end, responses that nobody reads, connections that only wait."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from tests.attack.http import raw
from tests.attack.stack import HTTP, MIB, Attacked, undisturbed, unharmed


async def test_requests_that_never_end_block_no_other(stack: Attacked) -> None:
    async with unharmed(stack, HTTP), AsyncExitStack() as opened:
        peers = await raw.slow_requests(stack.http, opened, 60)
        async with undisturbed(stack, HTTP):
            pass
        assert await peers[0].send(b"{"), "its time is not over"


async def test_unread_streams_end_and_block_no_other(stack: Attacked) -> None:
    async with unharmed(stack, HTTP), AsyncExitStack() as opened:
        await raw.unread(stack.http, opened, 5, max_tokens=300, logprobs=20)
        assert await stack.after_sessions(1) <= 1, "but for the bystander's"


async def test_unread_responses_are_cut_off_and_block_no_other(stack: Attacked) -> None:
    """The attackers close nothing before the gateway has."""
    async with AsyncExitStack() as opened, unharmed(stack, HTTP):
        await raw.unread_responses(stack.http, opened, 20)


async def test_responses_read_but_for_their_end_are_cut_off_and_block_no_other(stack: Attacked) -> None:
    """Leave from 8 to 256 KiB: some of them fit into the buffers of both kernels, but for a few KiB."""
    async with AsyncExitStack() as opened, unharmed(stack, HTTP):
        await asyncio.gather(*(raw.nearly_read(stack.http, opened, left << 13) for left in range(1, 33)))


async def test_idle_connections_take_bounded_memory_and_block_no_other(stack: Attacked) -> None:
    """Open 1,000 connections; `make prove-attacks` opens 10,000."""
    stack.forget_peak()
    async with unharmed(stack, HTTP) as before, AsyncExitStack() as opened:
        assert await raw.idle(stack.http, opened, 1000) == 1000
        async with undisturbed(stack, HTTP):
            pass
    assert stack.peak_rss() - before.rss < 64 * MIB
