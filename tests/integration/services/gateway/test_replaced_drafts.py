"""Streams go on while the weights of their draft are replaced, with the same tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from galley.client.options import Speculation
from galley.common.draft_loading import send_draft
from tests.fakes.redis_servers import Server
from tests.fakes.tiny_model import greedy
from tests.fakes.world import Received, receive
from tests.integration.galley.engine.drafts import draft_of
from tests.integration.services.draft.conftest import draft_server
from tests.integration.services.gateway.real import Real

PROMPTS = [[5, 9, 2, 33] * 35, [3, 8, 2]]
COUNT = 50
SAMPLED = {"temperature": 0.9, "seed": 5}
K = 4


@pytest.fixture(scope="module")
def drafts(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A draft that is right nearly always, and one that hardly ever is."""
    directory = tmp_path_factory.mktemp("drafts")
    good, bad = draft_of(tiny, int8=False), draft_of(tiny, int8=False)
    bad.weights["lm_head.weight"] = bad.weights["lm_head.weight"].roll(1, 0)
    return {"good": good.save(directory / "good"), "bad": bad.save(directory / "bad")}


@pytest.fixture
async def real(
    tmp_path: Path, tiny: Path, shared_store: Server, drafts: dict[str, Path]
) -> AsyncIterator[Real]:
    async with draft_server(
        model=str(drafts["good"]),
        target_model=str(tiny),
        dtype="float32",
        default_strategy="model",
        max_load_mib=1,
        version="good",
    ) as draft:
        real = Real(tmp_path, tiny, shared_store.url, credit=0)
        real.draft_address = draft.address
        async with real:
            yield real


def generate(real: Real, prompt: list[int], **options: float) -> asyncio.Task[Received]:
    stream = real.generate(prompt, max_tokens=COUNT, speculation=Speculation(k=K), **options)
    return asyncio.create_task(receive(stream))


def rounds_without_proposal(received: Received) -> int:
    speculation = received.end.speculation
    return speculation.rounds - speculation.proposals


async def test_tokens_stay_the_same_and_a_swap_costs_at_most_one_proposal(
    real: Real, tiny: Path, drafts: dict[str, Path]
) -> None:
    truth = [greedy(tiny, prompt, COUNT) for prompt in PROMPTS]
    before = [await generate(real, prompt) for prompt in PROMPTS]
    sampled = [await generate(real, prompt, **SAMPLED) for prompt in PROMPTS]
    assert [one.tokens for one in before] == truth
    real.targets[0].engine.pass_s = 0.005
    loaded: list[str] = []
    async with grpc.aio.insecure_channel(real.draft_address) as channel:
        while len(loaded) < 2:
            swaps = len(loaded)
            meanwhile = [generate(real, prompt) for prompt in PROMPTS]
            meanwhile += [generate(real, prompt, **SAMPLED) for prompt in PROMPTS]
            while not all(stream.done() for stream in meanwhile):
                name = "good" if len(loaded) % 2 else "bad"
                loaded.append(await send_draft(channel, drafts[name], name))
            received = await asyncio.gather(*meanwhile)
            assert [one.tokens for one in received] == truth + [one.tokens for one in sampled]
            most = max(rounds_without_proposal(one) for one in (*before, *sampled))
            assert max(rounds_without_proposal(one) for one in received) <= most + len(loaded) - swaps
        for name in ("bad", "good"):
            await send_draft(channel, drafts[name], name)
            after = await generate(real, PROMPTS[0])
            assert after.tokens == truth[0]
            assert (sum(after.from_draft) > COUNT / 2) == (name == "good")
