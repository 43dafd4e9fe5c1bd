"""What a target counts: each number against the passes that its engine ran."""

from __future__ import annotations

import pytest

from galley.common.metrics import catalogue
from galley.common.metrics.catalogue import of_service
from galley.common.metrics.labels import TARGET
from galley.common.metrics.registry import Registry
from galley.common.wire.codec import grammar_message
from galley.core.grammar.spec import GrammarSpec
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from tests.fakes.readings import count, histogram, number
from tests.fakes.tiny_model import STOP
from tests.fakes.verify_items import slice_of, stream_of, verify
from tests.integration.services.target.conftest import KV_BLOCKS, Recording, pages

PROMPT = [5, 9, 2, 33] * 12


@pytest.fixture
def registry() -> Registry:
    return Registry(TARGET)


async def test_passes_and_the_kv_pool_are_what_the_engine_saw(
    target: rpc.TargetAsyncStub, engine: Recording, registry: Registry
) -> None:
    assert set(registry.metrics) == set(of_service(TARGET))
    assert number(registry, catalogue.KV_BLOCKS, "free") == KV_BLOCKS
    async with stream_of(target) as stream:
        await stream.send(pb.VerifyItem(slice=slice_of(PROMPT), draft_tokens=[1, 2], credit=4))
        answers = await stream.until_last()
    rows = [plan.rows for plan in engine.passes]
    confirmed = sum(len(answer.result.tokens) for answer in answers)
    assert histogram(registry, catalogue.BATCH_ROWS).total == sum(rows)
    assert histogram(registry, catalogue.BATCH_TOKENS).total == confirmed
    assert histogram(registry, catalogue.BATCH_SESSIONS).total == len(rows)
    assert count(registry, catalogue.BATCH_DURATION) == len(rows)
    assert count(registry, catalogue.QUEUE_AGE) == 1, "of an item, once"
    verified = sum(answer.result.verified for answer in answers)
    assert number(registry, catalogue.BATCH_DRAFT_ROWS) == verified > 0
    assert number(registry, catalogue.BATCH_PREFILL_ROWS) == sum(rows) - verified - len(answers)
    assert number(registry, catalogue.QUEUE_DEPTH) == 0
    assert number(registry, catalogue.KV_PROMPT_TOKENS) == len(PROMPT)
    assert number(registry, catalogue.KV_REUSED_TOKENS) == 0
    blocks = {state: number(registry, catalogue.KV_BLOCKS, state) for state in ("used", "cached", "free")}
    assert blocks["used"] == 0
    assert 0 < blocks["cached"] == KV_BLOCKS - blocks["free"]


@pages
async def test_the_wait_for_masks_is_counted(target: rpc.TargetAsyncStub, registry: Registry) -> None:
    await verify(target, pb.VerifyItem(slice=slice_of(PROMPT)))
    assert number(registry, catalogue.MASK_WAIT) == 0
    grammar = GrammarSpec("regex", "[a-f]{9}")
    part = slice_of(
        PROMPT,
        prompt_len=len(PROMPT),
        session_id="b",
        stop_token_ids=[STOP],
        grammar_hash=grammar.content_hash,
        structured_output=grammar_message(grammar),
    )
    await verify(target, pb.VerifyItem(slice=part))
    waited, steps = number(registry, catalogue.MASK_WAIT), histogram(registry, catalogue.BATCH_DURATION)
    assert 0 < waited < steps.total


async def test_a_prompt_that_is_cached_is_reused_and_a_prefix_that_is_not_is_a_miss(
    target: rpc.TargetAsyncStub, registry: Registry
) -> None:
    for session_id in ("a", "b"):
        await verify(target, pb.VerifyItem(slice=slice_of(PROMPT, session_id=session_id)))
    assert number(registry, catalogue.KV_PROMPT_TOKENS) == 2 * len(PROMPT)
    assert number(registry, catalogue.KV_REUSED_TOKENS) == 32, "a whole block"
    [missed] = await verify(target, pb.VerifyItem(slice=slice_of(PROMPT, start=4, session_id="c")))
    assert missed.HasField("cache_miss")
    assert number(registry, catalogue.KV_MISSES) == 1


async def test_too_small_pool_preempts_evicts_and_counts_it(
    target: rpc.TargetAsyncStub, registry: Registry
) -> None:
    long = [token % 100 for token in range(KV_BLOCKS // 4 * 20)]
    for index in range(6):
        prompt = [index + 1, *long]
        answers = await verify(target, pb.VerifyItem(slice=slice_of(prompt, session_id=str(index))))
        assert answers[0].HasField("result")
    assert number(registry, catalogue.EVICTIONS) > 0
    assert number(registry, catalogue.PREEMPTIONS) == 0, "nobody was at work"
    assert number(registry, catalogue.OUT_OF_BLOCKS) == 0
