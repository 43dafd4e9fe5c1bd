"""A draft process that is asked only while a row of the target costs less than a draft token is worth."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from galley.common.host import this_host
from galley.common.metrics import catalogue
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.top.scrape import scrape
from tests.fakes.processes import service_process
from tests.fakes.waiting import PATIENCE_S
from tests.fakes.world import World, receive

MS = 1_000_000
STREAMS = 4
TOKENS = 60


class Priced:
    """What a target with many sessions reports of its steps: 10 ms a session, `row_ms` for a further row."""

    def __init__(self, row_ms: int) -> None:
        self.row_ms = row_ms

    def __call__(self, result: pb.VerifyResult) -> None:
        result.batch_sessions = 8
        result.timing.compute_ns = 80 * MS
        result.row_ns = self.row_ms * MS


@pytest.fixture
def credit() -> int:
    return 32


@pytest.fixture
async def draft_metrics(world: World, tmp_path: Path) -> AsyncIterator[str]:
    """Run a draft process in place of the world's; yield the address of its metrics."""
    flags = {"tokenizer": str(world.tokenizer), "metrics-port": "0", "log-level": "error"}
    async with service_process("services.draft", tmp_path / "log", {}, flags) as ready:
        world.draft.address, fake = ready["address"], world.draft.address
        yield ready["metrics"]
        world.draft.address = fake


async def proposals(metrics: str) -> float:
    """Return how many requests the draft process has had."""
    samples = await scrape(metrics, PATIENCE_S)
    return sum(samples.get(catalogue.DRAFT_PROPOSALS.series[0], {}).values())


async def test_a_draft_process_is_asked_only_where_a_token_can_be_worth_its_row(
    world: World, draft_metrics: str
) -> None:
    gateway = await world.gateway()

    async def answer() -> None:
        streams = [gateway.generate(max_tokens=TOKENS) for _ in range(STREAMS)]
        received = await asyncio.gather(*map(receive, streams))
        assert all(len(each.tokens) == TOKENS for each in received)

    world.target.spoil = priced = Priced(row_ms=10)
    await answer()
    first = await proposals(draft_metrics)
    assert first <= 4, "those before the first step was measured"
    for _ in range(3):
        await answer()
    assert await proposals(draft_metrics) == first, "no request in 720 tokens"

    priced.row_ms = 0
    await answer()
    assert await proposals(draft_metrics) > first + STREAMS, "as soon as rows are cheap"


@pytest.mark.usefixtures("draft_metrics")
async def test_a_gateway_notes_the_cores_that_draft_and_target_share(world: World) -> None:
    cores = this_host(1).cores
    world.target.host = this_host(cores)
    gateway = await world.gateway()
    service: Any = gateway.running.service
    assert service._streams.shared.contention == min(1.0, (1 + cores) / cores - 0.75)
