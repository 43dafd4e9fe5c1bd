"""Work between the steps: a piece at a time, at nobody's expense."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.fakes.redis_clusters import until
from tests.fakes.tiny_model import greedy
from tests.fakes.waiting import PATIENCE_S
from tests.integration.services.draft.steps import Serving, gating, item

PROMPT = [5, 9, 2, 33, 17]


class Pieces:
    def __init__(self, count: int, *, fails: bool = False) -> None:
        self.left = count
        self.fails = fails

    @property
    def has_work(self) -> bool:
        return self.left > 0

    def work(self) -> None:
        self.left -= 1
        if self.fails:
            raise ValueError("a piece")


def give(draft: Serving, pieces: Pieces) -> None:
    draft.loop.background = pieces
    draft.loop.wake()


async def test_a_step_waits_for_one_piece_at_most(tiny: Path) -> None:
    pieces = Pieces(5)
    async with gating(tiny) as (gated, stream, draft):
        await stream.send(item(PROMPT, 4, "a"))
        await gated.step_started()
        give(draft, pieces)
        await gated.pass_on()
        assert pieces.left == 4
        gated.open()
        assert list((await stream.next()).result.draft_tokens) == greedy(tiny, PROMPT, 4)
        await until(lambda: _is_done(pieces))


async def test_it_begins_in_an_idle_draft(tiny: Path) -> None:
    pieces = Pieces(50)
    async with gating(tiny) as (_, __, draft):
        give(draft, pieces)
        await until(lambda: _is_done(pieces))


async def test_a_piece_that_fails_fails_no_request(tiny: Path) -> None:
    pieces = Pieces(3, fails=True)
    async with gating(tiny) as (gated, stream, draft):
        gated.open()
        give(draft, pieces)
        await stream.send(item(PROMPT, 4, "a"))
        assert list((await stream.next()).result.draft_tokens) == greedy(tiny, PROMPT, 4)
        await until(lambda: _is_done(pieces))


async def test_a_draft_that_drains_waits_for_requests_only(tiny: Path) -> None:
    async with gating(tiny) as (_, __, draft):
        give(draft, Pieces(2**62))
        async with asyncio.timeout(PATIENCE_S):
            await draft.loop.drain()


async def _is_done(pieces: Pieces) -> bool:
    return not pieces.has_work
