"""Answers that one draft followed, proposed by another one: from the gateway's request to its statistics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from pydantic import SecretStr

from galley.common.metrics import catalogue
from galley.common.metrics.labels import GATEWAY
from galley.common.metrics.registry import Registry
from galley.common.server.server import Parts, start_server
from galley.core.content import token_bytes
from galley.core.names import SHARED
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from services.draft.__main__ import build
from services.draft.answers.mailbox import SharedAnswers
from services.draft.settings import DraftSettings
from tests.fakes.readings import number
from tests.fakes.redis_clusters import until
from tests.fakes.redis_servers import Server
from tests.fakes.stored import stored, written
from tests.fakes.truth import SEED
from tests.fakes.world import MAX_TOKENS, PROMPT, Gateway, Received, World, must_be_true, receive
from tests.integration.services.gateway.callers import ALICE, BOB, KeyFile, calling

WORKLOAD = "extract"
RUN = 8
"""Tokens that two answers do not share by chance; characters of four tokens are frequent in them."""


@asynccontextmanager
async def draft_beside(world: World) -> AsyncIterator[str]:
    """Start a draft of the world's tokenizer that shares answers in the world's Redis; yield its address."""
    # The pool is the world's own, as other worlds use the same Redis.
    settings = DraftSettings(
        tokenizer=str(world.tokenizer), redis_url=SecretStr(world.redis_url), pool=world.id, drain_timeout_s=5
    )
    running = await start_server(settings, build(settings))
    try:
        yield running.address
    finally:
        await running.stop()


async def ask(gateway: Gateway, prompt: str) -> Received:
    request = pb.GenerateRequest(
        text=prompt,
        max_tokens=MAX_TOKENS,
        sampling=pb.SamplingParams(seed=SEED),
        ignore_eos=True,
        workload=WORKLOAD,
        speculation=pb.Speculation(mode=pb.Speculation.MODE_FIXED, k=4),
    )
    result = Received()
    async with grpc.aio.insecure_channel(gateway.address) as channel:
        stub: rpc.GenerationAsyncStub = rpc.GenerationStub(channel)
        async for response in stub.Generate(request):
            result.receive(response.event)
    return result


async def answered(gateway: Gateway) -> dict[str, pb.SourceStats]:
    """Return the statistics of an answer by source."""
    result = await ask(gateway, PROMPT)
    must_be_true(result)
    return {one.source: one for one in result.end.speculation.sources}


@pytest.fixture
def delivered(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Return what is set once a draft has read what others share."""
    event, deliver = asyncio.Event(), SharedAnswers.deliver

    def deliver_and_tell(*given: Any) -> None:
        deliver(*given)
        event.set()

    monkeypatch.setattr(SharedAnswers, "deliver", deliver_and_tell)
    return event


async def test_an_answer_outlives_the_draft_that_saw_it(world: World, delivered: asyncio.Event) -> None:
    async with draft_beside(world) as first:
        sources = await answered(await world.gateway(draft=first))
        assert SHARED not in sources

    async def is_shared() -> bool:
        """Ask a new draft, since one that has seen the answer itself proposes it as its own."""
        registry = Registry(GATEWAY)
        async with draft_beside(world) as draft:
            gateway = await world.gateway_of(Parts(metrics=registry), draft=draft)
            delivered.clear()
            await ask(gateway, "Another question.")  # so that it reads what is shared
            await delivered.wait()
            sources = await answered(gateway)
        if SHARED not in sources or sources[SHARED].accepted < MAX_TOKENS // 2:
            return False
        counted = number(registry, catalogue.ACCEPTED_TOKENS, WORKLOAD, SHARED, "tiny")
        assert counted >= MAX_TOKENS // 2
        return True

    await until(is_shared)


async def test_shared_answers_are_apart_by_principal_and_name_neither_it_nor_a_session(
    frail_world: World, own_store: Server
) -> None:
    keys = KeyFile().write(frail_world)
    async with draft_beside(frail_world) as draft:
        gateway = await frail_world.gateway(draft=draft, api_keys_file=keys)
        async with calling(gateway, ALICE) as alice, calling(gateway, BOB) as bob:
            answers = [
                await receive(alice.generate("Alice asks this.", workload=WORKLOAD)),
                await receive(bob.generate("Bob asks something else.", workload=WORKLOAD)),
            ]

    # The draft has published the last parts before it ended.
    held = await stored(own_store)
    logs = {key: value for key, value in held.items() if key.startswith("galley:answers:")}
    runs = [[answer.tokens[at : at + RUN] for at in range(len(answer.tokens) - RUN)] for answer in answers]
    of_callers = [
        {key for key, value in logs.items() if any(token_bytes(run) in value for run in of_caller)}
        for of_caller in runs
    ]
    assert [len(found) for found in of_callers] == [1, 1], "each answer is in the log of its principal alone"
    assert not of_callers[0] & of_callers[1]
    sessions = {key for key in held if key.startswith("galley:sessions:")}
    beside = b"\n".join(value for key, value in held.items() if key not in {*sessions, *logs})
    assert not any(form in beside for of_caller in runs for run in of_caller for form in written(run))
    told = b"\n".join(logs.values())
    for answer in answers:
        assert answer.started is not None
        assert answer.started.session_id.encode() not in told
        assert answer.text.encode() not in told
    assert not any(name in told for name in (b"alice", b"bob", WORKLOAD.encode()))
    async with own_store.raw() as raw:
        assert all([await raw.pttl(key) > 0 for key in logs]), "what is shared expires"
