"""The spans of a target: one a request, and one a step, below one of its requests and linked to all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from galley.common.tracing.light_spans import SpanScope
from galley.common.wire.codec import grammar_message
from galley.core.grammar.spec import GrammarSpec
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from services.target.engine.protocol import Limits
from tests.fakes.spans import KeptSpans, NotedScope, attributes_of, context_of, events_of, links_of, parent_of
from tests.fakes.tiny_model import STOP
from tests.fakes.verify_items import Stream, slice_of, stream_of, verify
from tests.integration.services.target.conftest import KV_BLOCKS, Recording, pages

TRACE = 0xABC
PROMPT = [5, 9, 2, 33]
ITEM, BATCH = "galley.v1.Target/Verify", "verify batch"


@pytest.fixture
def kept() -> KeptSpans:
    return KeptSpans()


@pytest.fixture
def spans(kept: KeptSpans) -> SpanScope:
    return kept.scope


def item_of(tokens: list[int], *, trace_id: int = TRACE, **given: Any) -> pb.VerifyItem:
    return pb.VerifyItem(slice=slice_of(tokens, traceparent=parent_of(trace_id), **given))


def span_bytes(span: ReadableSpan) -> bytes:
    trace_id, span_id = context_of(span)
    return trace_id.to_bytes(16, "big") + span_id.to_bytes(8, "big")


async def test_a_request_has_a_span_and_its_steps_link_to_it(
    target: rpc.TargetAsyncStub, kept: KeptSpans
) -> None:
    request = item_of(PROMPT)
    request.draft_tokens.append(1)
    request.credit = 2
    async with stream_of(target) as stream:
        await stream.send(request)
        answers = await stream.until_last()
    (item,) = kept.named(ITEM)
    assert item.parent is not None
    assert (item.parent.trace_id, item.parent.span_id, item.kind) == (TRACE, 0xDEF, SpanKind.SERVER)
    attributes = attributes_of(item)
    results = [answer.result for answer in answers]
    assert {
        name: attributes[f"galley.{name}"] for name in ("session.id", "credit", "verdicts", "outcome")
    } == {
        "session.id": "s",
        "credit": 2,
        "verdicts": len(answers),
        "outcome": "result",
    }
    assert attributes["galley.confirmed"] == sum(len(result.tokens) for result in results)
    assert attributes["galley.verified"] == sum(result.verified for result in results)
    assert attributes["galley.accepted"] == sum(result.accepted for result in results)
    assert attributes["galley.kv.reused"] == 0
    batches = kept.named(BATCH)
    assert len(batches) == len(answers) > 1
    for batch, result in zip(batches, results, strict=True):
        assert batch.parent == item.parent
        assert links_of(batch) == {context_of(item)}
        assert result.batch_span == span_bytes(batch)
        assert item.start_time is not None
        assert batch.start_time is not None
        assert batch.end_time is not None
        assert item.end_time is not None
        assert item.start_time <= batch.start_time < batch.end_time <= item.end_time


@pages
async def test_the_span_of_a_step_has_its_size_and_times(
    target: rpc.TargetAsyncStub, kept: KeptSpans
) -> None:
    traced = item_of(PROMPT, session_id="traced")
    traced.draft_tokens.append(1)
    also = item_of(PROMPT[:3], session_id="also", trace_id=TRACE + 1)
    untraced = pb.VerifyItem(
        slice=slice_of(PROMPT[:2], session_id="other", traceparent=parent_of(3, sampled=False))
    )
    answers = await verify(target, traced, also, untraced)
    (batch,) = kept.named(BATCH)
    assert links_of(batch) == {context_of(item) for item in kept.named(ITEM)}
    assert {trace_id for trace_id, _ in links_of(batch)} == {TRACE, TRACE + 1}
    assert {context_of(span)[0] for span in kept.spans} == {TRACE, TRACE + 1}
    assert batch.parent in [item.parent for item in kept.named(ITEM)]
    attributes = dict(attributes_of(batch))
    forward_ns = attributes.pop("galley.batch.forward_ns")
    (rank_ns,) = attributes.pop("galley.batch.rank_forward_ns")
    assert attributes == {
        "galley.batch.sessions": 3,
        "galley.batch.rows": 4 + 3 + 2 + 1,
        "galley.batch.draft_rows": 1,
        "galley.batch.prefill_rows": 3 + 2 + 1,
        "galley.batch.prefill_share": 0.6,
        "galley.kv.free_blocks": KV_BLOCKS - 3,
        "galley.queue.depth": 3,
    }
    assert batch.start_time is not None
    assert batch.end_time is not None
    assert 0 < rank_ns <= forward_ns < batch.end_time - batch.start_time
    assert {answer.result.batch_span for answer in answers} == {span_bytes(batch)}


@pages
async def test_the_span_of_a_step_says_how_long_masks_took(
    target: rpc.TargetAsyncStub, kept: KeptSpans
) -> None:
    grammar = GrammarSpec("regex", "[a-f]{9}")
    fields: dict[str, Any] = {
        "grammar_hash": grammar.content_hash,
        "structured_output": grammar_message(grammar),
    }
    await verify(target, item_of(PROMPT, prompt_len=len(PROMPT), stop_token_ids=[STOP], **fields))
    (batch,) = kept.named(BATCH)
    assert batch.start_time is not None
    assert batch.end_time is not None
    assert 0 < attributes_of(batch)["galley.batch.mask_wait_ns"] < batch.end_time - batch.start_time


@pytest.mark.parametrize("kept", [NotedScope()], ids=["on"])
@pytest.mark.parametrize("parent", ["", "0" * 55, parent_of(TRACE, sampled=False)])
async def test_untraced_requests_make_no_span(
    target: rpc.TargetAsyncStub, kept: NotedScope, parent: str
) -> None:
    async with stream_of(target) as stream:
        await stream.send(pb.VerifyItem(slice=slice_of(PROMPT, traceparent=parent), credit=2))
        answers = await stream.until_last()
    (refused,) = await verify(target, pb.VerifyItem(slice=slice_of([], traceparent=parent)))
    assert refused.HasField("status")
    assert {answer.result.batch_span for answer in answers} == {b""}
    assert kept.names == []


async def test_reused_tokens_are_recorded(target: rpc.TargetAsyncStub, kept: KeptSpans) -> None:
    (first,) = await verify(target, item_of(PROMPT))
    await verify(target, item_of([*PROMPT, *first.result.tokens]))
    assert [attributes_of(span)["galley.kv.reused"] for span in kept.named(ITEM)] == [0, 4]


async def test_failures_of_requests_and_steps_are_recorded(
    target: rpc.TargetAsyncStub, engine: Recording, kept: KeptSpans
) -> None:
    refused = item_of(PROMPT, session_id="refused")
    refused.draft_tokens.extend([1] * 9)
    engine.failure = ValueError("secret")
    await verify(target, refused, item_of(PROMPT, session_id="failed"))
    kinds = {"refused": "invalid_argument", "failed": "unavailable"}
    for name, kind in kinds.items():
        span = kept.of_session(ITEM, name)
        assert (attributes_of(span)["error.type"], span.status.status_code) == (kind, StatusCode.ERROR)
        assert attributes_of(span)["galley.outcome"] == "error"
        assert "secret" not in span.to_json()
    (batch,) = kept.named(BATCH)
    assert (attributes_of(batch)["error.type"], batch.status.status_code) == ("unavailable", StatusCode.ERROR)
    assert links_of(batch) == {context_of(kept.of_session(ITEM, "failed"))}
    assert "galley.batch.forward_ns" not in attributes_of(batch)


async def test_superseded_and_cancelled_requests_are_recorded(
    target: rpc.TargetAsyncStub, engine: Recording, kept: KeptSpans
) -> None:
    engine.gate.clear()
    async with stream_of(target) as stream:
        await stream.send(item_of(PROMPT, session_id="busy"))
        assert await asyncio.to_thread(engine.started.acquire, timeout=10)
        await stream.send(item_of(PROMPT, session_id="a"), item_of([*PROMPT, 1], session_id="a"))
        await stream.send(item_of(PROMPT, session_id="b"))
        await stream.send(cancelled=[pb.ItemRef(session_id="b", request_id=7)])
        await stream.received()
        engine.gate.set()
        while (await stream.next()).WhichOneof("outcome") != "result":
            pass
    outcomes = {
        (attributes_of(span)["galley.session.id"], attributes_of(span)["galley.outcome"])
        for span in kept.named(ITEM)
    }
    assert {("a", "superseded"), ("b", "cancelled"), ("busy", "result")} <= outcomes


@pytest.mark.parametrize("limits", [Limits(max_draft_tokens=8, max_sessions=1)])
async def test_a_preempted_session_is_recorded(
    target: rpc.TargetAsyncStub, engine: Recording, kept: KeptSpans
) -> None:
    young = item_of(PROMPT, session_id="young", arrival_ns=9)
    young.credit = 100
    engine.gate.clear()
    async with stream_of(target) as stream:
        await stream.send(young)
        assert await asyncio.to_thread(engine.started.acquire, timeout=10)
        await stream.send(item_of(PROMPT[:2], session_id="old", arrival_ns=1))
        await stream.received()
        engine.gate.set()
        seen = await until(stream, "old")
    (lost,) = [answer.cache_miss for answer in seen if answer.HasField("cache_miss")]
    span = kept.of_session(ITEM, "young")
    assert list(events_of(span)) == [("kv.preempted", {"galley.pool": "target", "galley.have": lost.have})]
    assert attributes_of(span)["galley.outcome"] == "cache_miss"
    (of_old,) = [
        batch for batch in kept.named(BATCH) if links_of(batch) == {context_of(kept.of_session(ITEM, "old"))}
    ]
    assert ("kv.preempted", {"galley.session.id": "young"}) in list(events_of(of_old))


async def until(stream: Stream, session_id: str) -> list[pb.VerifyAnswer]:
    seen = [await stream.next()]
    while seen[-1].session_id != session_id:
        seen.append(await stream.next())
    return seen


@pages
@pytest.mark.parametrize("limits", [Limits(max_sessions=10, max_rows=2048)])
async def test_evicted_sessions_are_recorded(target: rpc.TargetAsyncStub, kept: KeptSpans) -> None:
    # 32 blocks of 32 tokens hold 6 sessions of 150.
    filling = [
        pb.VerifyItem(slice=slice_of([2 + i] * 150, session_id=f"s{i}", arrival_ns=1 + i)) for i in range(6)
    ]
    await verify(target, *filling)
    await verify(target, item_of([40] * 150, session_id="new", arrival_ns=9))
    (batch,) = kept.named(BATCH)
    assert list(events_of(batch)) == [("kv.evicted", {"galley.session.id": "s0"})]
