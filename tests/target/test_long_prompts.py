"""A long prompt takes several steps, and the others one of them at a time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from services.common.pb.galley.v1 import galley_pb2 as pb
from services.target.verifier import Verifier
from tests.target.conftest import Recording
from tests.target.items import slice_of, verify
from tests.target.tiny import VOCAB, greedy

if TYPE_CHECKING:
    from pathlib import Path

    from services.common.pb.galley.v1 import galley_pb2_grpc as rpc
    from services.engine.model import CausalModel

LONG = [1 + (7 * i) % (VOCAB - 2) for i in range(180)]
OTHER = [1 + (5 * i) % (VOCAB - 2) for i in range(170)]
SHORT = [5, 9, 2]
ROWS = 60


@pytest.fixture
def engine(model: CausalModel) -> Recording:
    return Recording(Verifier(model, "f00d", max_sessions=10, max_kv_tokens=1024, max_new_rows=ROWS))


def item(tokens: list[int], session_id: str, draft_tokens: tuple[int, ...] = ()) -> pb.VerifyItem:
    return pb.VerifyItem(slice=slice_of(tokens, session_id=session_id), draft_tokens=draft_tokens)


async def test_the_others_go_on_between_its_steps(
    target: rpc.TargetAsyncStub, engine: Recording, tiny: Path
) -> None:
    engine.gate.clear()
    long = asyncio.ensure_future(verify(target, item(LONG, "long", (3, 3))))
    assert await asyncio.to_thread(engine.begun.acquire, timeout=10)
    short = asyncio.ensure_future(verify(target, item(SHORT, "short")))
    other = asyncio.ensure_future(verify(target, item(OTHER, "other")))
    engine.gate.set()
    answers = [(await asked)[0].result for asked in (long, short, other)]

    assert [answer.tokens[0] for answer in answers] == [
        greedy(tiny, prompt, 1)[0] for prompt in (LONG, SHORT, OTHER)
    ]
    steps = {
        name: [i for i, batch in enumerate(engine.batches) if name in batch] for name in ("long", "short")
    }
    assert len(steps["long"]) > len(LONG) / ROWS
    assert len(steps["short"]) == 1
    assert steps["short"][0] < steps["long"][-1], "it did not wait for the long prompt's end"
    assert [batch[0] for batch in engine.batches[: len(steps["long"])]] == ["long"] * len(steps["long"])


async def test_a_prompt_given_up_midway_is_taken_up_where_it_stands(
    target: rpc.TargetAsyncStub, engine: Recording, tiny: Path
) -> None:
    engine.gate.clear()
    asked = asyncio.ensure_future(verify(target, item(LONG, "long")))
    assert await asyncio.to_thread(engine.begun.acquire, timeout=10)
    asked.cancel()
    await asyncio.wait({asked})
    # A short item behind it shows that the cancelled one is out of the queue.
    short = asyncio.ensure_future(verify(target, item(SHORT, "short")))
    engine.gate.set()
    await short
    steps_before = len(engine.batches)
    answer = (await verify(target, item(LONG, "long")))[0].result
    assert answer.tokens == greedy(tiny, LONG, 1)
    assert len(engine.batches) - steps_before < len(LONG) / ROWS + 1
