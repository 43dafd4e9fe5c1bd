"""A long prompt takes several passes, and the others take part in each of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from galley.common.server.reading import PART_TOKENS
from galley.common.server.server import Parts, start_server
from galley.core.cost.model import StepTimes
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from services.target.engine.protocol import Limits
from services.target.servicer import TargetService, add_target
from services.target.settings import TargetSettings
from tests.fakes.engine import KnownEngine
from tests.fakes.scheduler_world import STEEP
from tests.fakes.tiny_model import VOCAB, greedy
from tests.fakes.truth import IDS
from tests.fakes.verify_items import slice_of, stream_of, verify
from tests.integration.services.target.conftest import Recording, limited, pages

LONG = [1 + (7 * i) % (VOCAB - 2) for i in range(180)]
OTHER = [1 + (5 * i) % (VOCAB - 2) for i in range(170)]
SHORT = [5, 9, 2]
WIDE = 4 * PART_TOKENS
READ_IN_SLICES = slice_of([i % IDS for i in range(3 * PART_TOKENS)], max_position=WIDE)
EXTENDED = pb.Extension(
    session_id=READ_IN_SLICES.session_id,
    request_id=READ_IN_SLICES.request_id,
    limit=len(READ_IN_SLICES.tokens) + 3,
)
ROWS = 60


@pytest.fixture
def limits() -> Limits:
    return Limits(max_draft_tokens=8, max_sessions=10, max_rows=ROWS)


def item(
    tokens: list[int], session_id: str, draft_tokens: tuple[int, ...] = (), arrival_ns: int = 1
) -> pb.VerifyItem:
    named = slice_of(tokens, session_id=session_id, arrival_ns=arrival_ns)
    return pb.VerifyItem(slice=named, draft_tokens=draft_tokens)


async def until_here(target: rpc.TargetAsyncStub, items: int) -> None:
    while (await target.GetTargetInfo(pb.GetTargetInfoRequest())).queue_depth < items:
        pass


@pages
async def test_the_others_go_on_beside_it(target: rpc.TargetAsyncStub, engine: Recording, tiny: Path) -> None:
    await verify(target, item(SHORT, "short"))
    engine.gate.clear()
    long = asyncio.ensure_future(verify(target, item(LONG, "long", (3, 3))))
    assert await asyncio.to_thread(engine.started.acquire, timeout=10)
    assert await asyncio.to_thread(engine.started.acquire, timeout=10)
    other = asyncio.ensure_future(verify(target, item(OTHER, "other", arrival_ns=2)))
    short = asyncio.ensure_future(verify(target, item(SHORT, "short", arrival_ns=3)))
    await until_here(target, 3)
    engine.gate.set()
    answers = [(await request)[0].result for request in (long, other, short)]

    assert [answer.tokens[0] for answer in answers] == [
        greedy(tiny, prompt, 1)[0] for prompt in (LONG, OTHER, SHORT)
    ]
    passes = engine.passes[1:]
    assert all(plan.rows <= ROWS for plan in passes)
    assert [len(chunk.tokens) for chunk in passes[1].chunks] == [ROWS - 1, 1], "the short one joins the next"
    assert len(passes) == -(-(len(LONG) + len(OTHER) + 3) // ROWS), "no row of the budget is wasted"


@limited
async def test_a_prompt_given_up_midway_is_taken_up_where_it_stands(
    target: rpc.TargetAsyncStub, engine: Recording, tiny: Path
) -> None:
    engine.gate.clear()
    request = asyncio.ensure_future(verify(target, item(LONG, "long")))
    assert await asyncio.to_thread(engine.started.acquire, timeout=10)
    request.cancel()
    await asyncio.wait({request})
    # A short item behind it shows that the cancelled one is out of the queue.
    short = asyncio.ensure_future(verify(target, item(SHORT, "short")))
    await until_here(target, 1)
    engine.gate.set()
    await short
    passes_before = len(engine.passes)
    answer = (await verify(target, item(LONG, "long")))[0].result
    assert answer.tokens == greedy(tiny, LONG, 1)
    assert engine.passes[passes_before].chunks[0].start >= ROWS


class Priced(Recording):
    """An engine whose steps were measured to take 10 ms a row."""

    def __init__(self, **info: Any) -> None:
        engine = KnownEngine(**info)
        super().__init__(engine)
        self.info = engine.info

    def measure(self) -> StepTimes:
        return STEEP


@asynccontextmanager
async def added(engine: Priced, settings: TargetSettings) -> AsyncIterator[rpc.TargetAsyncStub]:
    """Serve the engine as `galley target` does."""

    async def build(server: grpc.aio.Server, parts: Parts) -> TargetService:
        return await add_target(server, parts, engine, settings)

    running = await start_server(settings, build, Parts())
    async with grpc.aio.insecure_channel(running.address) as channel:
        yield rpc.TargetStub(channel)
    await running.stop()


async def test_a_target_describes_the_threads_that_auto_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.target.settings.usable_cores", lambda: 7)
    async with added(Priced(), TargetSettings.model_validate({"threads": "auto"})) as target:
        assert (await target.GetTargetInfo(pb.GetTargetInfoRequest())).host.threads == 7


async def test_what_comes_while_a_long_prompt_is_read_follows_it() -> None:
    engine = Priced(context_window=WIDE, kv_blocks=WIDE)
    settings = TargetSettings(max_rows=1 << 16, max_itl_ms=0, drain_timeout_s=5)
    newer = slice_of([1, 2, 3], request_id=8)
    async with added(engine, settings) as target, stream_of(target) as stream:
        await stream.send(pb.VerifyItem(slice=READ_IN_SLICES, credit=1), extensions=[EXTENDED])
        answers = await stream.until_last()
        assert sum(len(answer.result.tokens) for answer in answers) == 3, "its extension was kept"
        await stream.send(pb.VerifyItem(slice=READ_IN_SLICES, credit=2000), pb.VerifyItem(slice=newer))
        answers = [await stream.next()]
        while answers[-1].request_id != newer.request_id:
            answers.append(await stream.next())
    assert answers[-2].HasField("superseded"), "the newer request did not overtake it"
    assert answers[-1].HasField("result")


async def test_a_long_prompt_that_is_given_up_while_it_is_read_is_never_computed() -> None:
    engine = Priced(context_window=WIDE, kv_blocks=WIDE)
    settings = TargetSettings(max_rows=1 << 16, drain_timeout_s=5)
    given_up = pb.ItemRef(session_id=READ_IN_SLICES.session_id, request_id=READ_IN_SLICES.request_id)
    async with added(engine, settings) as target, stream_of(target) as stream:
        await stream.send(pb.VerifyItem(slice=READ_IN_SLICES), cancelled=[given_up])
        await stream.send(pb.VerifyItem(slice=slice_of([1, 2, 3], request_id=8)))
        assert (await stream.next()).request_id == 8
    assert [len(chunk.tokens) for plan in engine.passes for chunk in plan.chunks] == [3]


async def test_a_long_prompt_with_too_long_a_salt_is_a_fault_of_its_caller() -> None:
    engine = Priced(context_window=WIDE, kv_blocks=WIDE)
    long = pb.VerifyItem(slice=READ_IN_SLICES, lora="an-adapter")
    long.slice.tenant_salt = b"s" * 65
    async with added(engine, TargetSettings(drain_timeout_s=5)) as target:
        [answer] = await verify(target, long)
    assert answer.status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert answer.status.message.startswith("slice.tenant_salt: must have at most")


@pytest.mark.parametrize(("max_itl_ms", "most"), [(200, 20), (0, len(LONG))])
async def test_a_prompt_beside_a_stream_takes_no_longer_a_step_than_the_setting_allows(
    max_itl_ms: float, most: int
) -> None:
    engine = Priced()
    async with added(engine, TargetSettings(max_itl_ms=max_itl_ms, drain_timeout_s=5)) as target:
        engine.gate.clear()
        async with stream_of(target) as stream:
            await stream.send(pb.VerifyItem(slice=slice_of([1]), credit=200))
            assert await asyncio.to_thread(engine.started.acquire, timeout=10)
            long = asyncio.ensure_future(verify(target, item([token % IDS for token in LONG], "long")))
            await until_here(target, 2)
            engine.gate.set()
            await long
    streamed, rows = sorted(len(chunk.tokens) for chunk in engine.passes[1].chunks)
    assert streamed == 1
    # The steps of the test are quicker than measured, or slower, which moves their price a little.
    assert 0.75 * most < rows <= most
