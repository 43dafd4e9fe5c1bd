"""The spans of ranks: each rank's part of a step, and the times of all."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import cast

import grpc
import pytest
import torch
from torch import Tensor

from galley.core.step import StepChunk, StepTrace, TokenMove
from galley.engine.model import CausalModel
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from services.target.engine.paged.engine import PagedEngine
from services.target.engine.protocol import Limits
from services.target.ranks.sharded import ShardedModel, follow
from services.target.spans import record_rank
from tests.fakes.spans import KeptSpans, attributes_of, context_of, parent_of
from tests.fakes.tiny_model import load_tiny_model
from tests.fakes.verify_items import slice_of, stream_of
from tests.integration.services.ray.hub import Hub
from tests.integration.services.target.conftest import Served

SIZE = 3
MS = 1_000_000
PROMPT = [5, 9, 2, 33]
BATCH, RANK = "verify batch", "rank forward"


class Other:
    """The model of rank `rank`, which computes for `rank` ms and waits as long."""

    def __init__(self, rank: int) -> None:
        self.own_ns = rank * MS
        self.ran = 0
        self.watched = 0

    def run(
        self,
        chunks: Sequence[StepChunk],
        copies: Sequence[tuple[int, int]] = (),
        watch: StepTrace | None = None,
        *,
        moves: Sequence[TokenMove] = (),
    ) -> Tensor:
        self.ran += 1
        if watch is not None:
            self.watched += 1
            watch.forward_ns = 2 * self.own_ns
            watch.rank_ns = lambda: (self.own_ns,)
        return torch.empty(0)


@asynccontextmanager
async def ranks_of(
    tiny: Path, traces: Sequence[KeptSpans]
) -> AsyncIterator[tuple[rpc.TargetAsyncStub, list[Other]]]:
    """A target of `SIZE` ranks whose rank r records in traces[r], and the models of the others."""
    hub = Hub(SIZE)
    others = [Other(rank) for rank in range(1, SIZE)]
    followers = [
        threading.Thread(
            target=follow,
            args=(
                cast("CausalModel", other),
                hub.ends[rank],
                partial(record_rank, traces[rank].scope, rank),
            ),
        )
        for rank, other in enumerate(others, start=1)
    ]
    for follower in followers:
        follower.start()
    model = ShardedModel(load_tiny_model(tiny, kv_blocks=32), hub.ends[0], on_loss=pytest.fail)
    served = Served(PagedEngine(model, "f00d", ranks=SIZE), Limits(), traces[0].scope)
    await served.start()
    try:
        async with grpc.aio.insecure_channel(served.running.address) as channel:
            yield rpc.TargetStub(channel), others
    finally:
        await served.stop()
        model.stop()
        for follower in followers:
            await asyncio.to_thread(follower.join)


async def verify_once(target: rpc.TargetAsyncStub, *, sampled: bool) -> list[pb.VerifyAnswer]:
    async with stream_of(target) as stream:
        item = slice_of(PROMPT, traceparent=parent_of(0xABC, sampled=sampled))
        await stream.send(pb.VerifyItem(slice=item, credit=2))
        return await stream.until_last()


async def test_each_rank_records_its_part_of_a_step(tiny: Path) -> None:
    traces = [KeptSpans() for _ in range(SIZE)]
    async with ranks_of(tiny, traces) as (target, _):
        answers = await verify_once(target, sampled=True)
    batches = traces[0].named(BATCH)
    assert len(batches) == len(answers) > 1
    for batch in batches:
        attributes = attributes_of(batch)
        own_ns, *others_ns = attributes["galley.batch.rank_forward_ns"]
        assert others_ns == [MS, 2 * MS]
        assert 0 < own_ns <= attributes["galley.batch.forward_ns"]
    for rank in range(1, SIZE):
        spans = traces[rank].named(RANK)
        assert [context_of(batch)[0] for batch in batches] == [context_of(span)[0] for span in spans]
        for span, batch in zip(spans, batches, strict=True):
            assert span.parent is not None
            assert span.parent.span_id == context_of(batch)[1]
            assert dict(attributes_of(span)) == {"galley.rank": rank, "galley.rank.waited_ns": rank * MS}
            assert span.start_time is not None
            assert span.end_time is not None
            assert span.end_time - span.start_time == 2 * rank * MS
    assert not traces[0].named(RANK)


async def test_an_untraced_step_is_not_measured(tiny: Path) -> None:
    traces = [KeptSpans() for _ in range(SIZE)]
    async with ranks_of(tiny, traces) as (target, others):
        answers = await verify_once(target, sampled=False)
    assert [(other.ran, other.watched) for other in others] == [(len(answers), 0)] * (SIZE - 1)
    assert not any(kept.named(name) for kept in traces for name in (BATCH, RANK))
