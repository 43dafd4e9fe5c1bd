"""What a session has drafted before saves steps, and changes no proposal; what came of it is learnt."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from galley.pb.galley.v1 import galley_pb2 as pb
from services.draft.strategies.model import ModelSteps, ModelStrategy
from tests.fakes.tiny_model import VOCAB, load_tiny_model
from tests.fakes.verify_items import GREEDY
from tests.integration.services.draft.steps import Gated, Serving, item, serving

PROMPT = [5, 9, 2, 33, 17]
WARM = pb.SamplingParams(temperature=1.1, seed=11, frequency_penalty=0.3)
either = pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])


@pytest.fixture
async def draft(tiny: Path) -> AsyncIterator[tuple[Serving, Gated]]:
    gated = Gated(ModelStrategy(ModelSteps(load_tiny_model(tiny, kv_blocks=512))))
    gated.open()
    async with serving(gated, max_sessions=400, max_tokens=8192) as serves:
        yield serves, gated


async def proposed(draft: Serving, request: pb.ProposeItem) -> pb.ProposeResult:
    (answer,) = (await draft.stub.Propose(pb.ProposeRequest(items=[request]))).answers
    assert answer.HasField("result"), answer
    return answer.result


async def proposals(draft: Serving, request: pb.ProposeItem) -> list[int]:
    return list((await proposed(draft, request)).draft_tokens)


@either
async def test_drafting_on_from_guesses_is_drafting_all_at_once(
    draft: tuple[Serving, Gated], sampling: pb.SamplingParams
) -> None:
    serves, gated = draft
    whole = await proposals(serves, item(PROMPT, 12, "whole", sampling=sampling))
    gated.steps.clear()
    tokens = list(PROMPT)
    for _ in range(4):
        tokens += await proposals(serves, item(tokens, 3, "parts", ahead=len(tokens) - 5, sampling=sampling))
    assert tokens[5:] == whole
    assert len(gated.steps) == 12


@either
async def test_known_draft_tokens_need_no_step(
    draft: tuple[Serving, Gated], sampling: pb.SamplingParams
) -> None:
    serves, gated = draft
    whole = await proposals(serves, item(PROMPT, 12, "s", sampling=sampling))
    gated.steps.clear()
    assert await proposals(serves, item(PROMPT + whole[:4], 8, "s", sampling=sampling)) == whole[4:]
    assert await proposals(serves, item(PROMPT + whole[:5], 2, "s", sampling=sampling)) == whole[5:7]
    assert gated.steps == []
    assert await proposals(serves, item(PROMPT + whole[:5], 4, "s", sampling=sampling)) == whole[5:9]
    assert len(gated.steps) == 2


async def test_other_sampling_is_other_guesses(draft: tuple[Serving, Gated]) -> None:
    serves, _ = draft
    for seed in range(3):
        sampling = pb.SamplingParams(temperature=1.1, seed=seed)
        again = await proposals(serves, item(PROMPT, 6, "s", sampling=sampling))
        assert again == await proposals(serves, item(PROMPT, 6, f"alone {seed}", sampling=sampling))


@pytest.mark.parametrize("seed", range(3))
async def test_proposals_do_not_depend_on_history_or_batch(draft: tuple[Serving, Gated], seed: int) -> None:
    serves, _ = draft
    chance = random.Random(seed)

    async def wander(name: str) -> list[tuple[pb.ProposeItem, list[int]]]:
        sampling = GREEDY if chance.random() < 0.5 else WARM
        tokens = [chance.randrange(2, VOCAB - 1) for _ in range(1 + chance.randrange(10))]
        trace = []
        for _ in range(12):
            ahead = chance.randrange(len(tokens))
            request = item(tokens, chance.randrange(7), name, ahead=ahead, prompt_len=1, sampling=sampling)
            came = await proposals(serves, request)
            trace.append((request, came))
            tokens = tokens + came[: chance.randrange(8)]
            if chance.random() < 0.4:
                tokens = [*tokens, chance.randrange(2, VOCAB - 1)]
            if chance.random() < 0.2:
                tokens = tokens[: 1 + chance.randrange(len(tokens))]
        return trace

    traces = await asyncio.gather(*(wander(f"{seed} {i}") for i in range(5)))
    for i, (request, came) in enumerate(one for trace in traces for one in trace):
        request.slice.session_id, request.ahead = f"alone {seed} {i}", 0
        assert await proposals(serves, request) == came


@either
async def test_survival_follows_what_is_confirmed(
    draft: tuple[Serving, Gated], sampling: pb.SamplingParams
) -> None:
    serves, _ = draft

    async def first_survival(name: str, right: bool, ahead: int = 0) -> float:
        request = item(PROMPT, 6, name, sampling=sampling)
        request.workload = "w"
        before = await proposed(serves, request)
        assert len(before.survival) == len(before.draft_tokens) == 6
        assert list(before.survival) == sorted(before.survival, reverse=True)
        assert all(0 <= chance <= 1 for chance in before.survival)
        reported = list(before.draft_tokens)[:1] if right else [(before.draft_tokens[0] + 1) % (VOCAB - 1)]
        again = item(PROMPT + reported, 1, name, ahead=ahead, sampling=sampling)
        again.workload = "w"
        await proposed(serves, again)
        return before.survival[0]

    begin = await first_survival("unconfirmed", right=False, ahead=1)
    assert await first_survival("a", right=True) == begin
    for i in range(10):
        await first_survival(f"right {i}", right=True)
    much = await first_survival("b", right=False)
    for i in range(60):
        await first_survival(f"wrong {i}", right=False)
    little = await first_survival("c", right=True)
    assert little < begin < much


async def test_tenants_learn_apart_and_new_workloads_begin_as_the_others(
    draft: tuple[Serving, Gated],
) -> None:
    serves, _ = draft

    async def survival(name: str, workload: str, salt: bytes) -> float:
        request = item(PROMPT, 1, name, tenant_salt=salt)
        request.workload = workload
        return (await proposed(serves, request)).survival[0]

    begin = await survival("first", "w", b"a")
    for i in range(10):
        await survival(f"{i}", "w", b"a")
        wrong = item([*PROMPT, 3], 1, f"{i}", tenant_salt=b"a")
        wrong.workload = "w"
        await proposed(serves, wrong)
    assert await survival("w again", "w", b"a") < begin
    assert await survival("w again", "w", b"a") < await survival("v", "v", b"a") < begin
    assert await survival("w", "w", b"b") == begin
