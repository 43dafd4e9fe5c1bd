"""The spans of a draft: one a request, and one a batch of steps between two arrivals."""

from __future__ import annotations

from pathlib import Path

import pytest
from opentelemetry.trace import SpanKind

from galley.pb.galley.v1 import galley_pb2 as pb
from services.draft.strategies.model import ModelSteps, ModelStrategy
from tests.fakes.spans import KeptSpans, NotedScope, attributes_of, context_of, links_of, parent_of
from tests.fakes.tiny_model import load_tiny_model
from tests.integration.services.draft.steps import gating, item, serving

TRACES = {"a": 0xABC, "b": 0xABD, "c": 0xABE}
ITEM, BATCH = "galley.v1.Draft/Propose", "draft batch"


def traced(tokens: list[int], k: int, name: str, **given: int) -> pb.ProposeItem:
    return item(tokens, k, name, traceparent=parent_of(TRACES[name]), **given)


def model_of(tiny: Path) -> ModelStrategy:
    return ModelStrategy(ModelSteps(load_tiny_model(tiny, kv_blocks=64)))


async def test_a_request_has_a_span_and_its_batch_links_to_it(tiny: Path) -> None:
    kept = KeptSpans()
    requests = [traced([5, 9, 2], k, name) for name, k in (("a", 3), ("b", 1))]
    async with serving(model_of(tiny), spans=kept.scope) as draft:
        answers = (await draft.stub.Propose(pb.ProposeRequest(items=requests))).answers
    for name, k, answer in zip("ab", (3, 1), answers, strict=True):
        span = kept.of_session(ITEM, name)
        assert span.kind is SpanKind.SERVER
        assert span.parent is not None
        assert (span.parent.trace_id, span.parent.span_id) == (TRACES[name], 0xDEF)
        result = answer.result
        assert len(result.draft_tokens) == k
        assert dict(attributes_of(span)) == {
            "rpc.system": "grpc",
            "galley.session.id": name,
            "galley.outcome": "result",
            "galley.strategy": "model",
            "galley.k": k,
            "galley.drafted": k,
            "galley.kv.len": result.kv_len,
            "galley.queue_ns": result.timing.queue_ns,
            "galley.compute_ns": result.timing.compute_ns,
            "galley.batch.sessions": result.batch_sessions,
        }
    (batch,) = kept.named(BATCH)
    assert batch.parent in [span.parent for span in kept.named(ITEM)]
    assert {context_of(span)[0] for span in kept.spans} == {TRACES["a"], TRACES["b"]}
    assert links_of(batch) == {context_of(span) for span in kept.named(ITEM)}
    assert dict(attributes_of(batch)) == {"galley.batch.sessions": 2, "galley.batch.steps": 3}
    assert batch.start_time is not None
    assert batch.end_time is not None
    assert batch.end_time - batch.start_time >= answers[0].result.timing.compute_ns


async def test_a_new_request_begins_another_batch(tiny: Path) -> None:
    kept = KeptSpans()
    async with gating(tiny, spans=kept.scope) as (gated, stream, _):
        await stream.send(traced([5, 9, 2], 4, "a"))
        await gated.step_started()
        await stream.send(
            traced([5, 9, 2], 4, "b"), item([5, 9], 4, "c", traceparent=parent_of(7, sampled=False))
        )
        gated.open()
        for _ in range(3):
            await stream.next()
    alone, together = kept.named(BATCH)
    a, b = (context_of(kept.of_session(ITEM, name)) for name in "ab")
    assert (links_of(alone), links_of(together)) == ({a}, {a, b})
    assert [attributes_of(batch)["galley.batch.sessions"] for batch in (alone, together)] == [1, 3]
    assert attributes_of(alone)["galley.batch.steps"] == 1
    assert alone.end_time is not None
    assert together.start_time is not None
    assert alone.end_time <= together.start_time
    assert len(kept.named(ITEM)) == 2


@pytest.mark.parametrize("parent", ["", parent_of(1, sampled=False)])
async def test_untraced_requests_make_no_span(tiny: Path, parent: str) -> None:
    asked_for = NotedScope()
    requests = [item([5, 9, 2], 3, "a", traceparent=parent), item([], 3, "b", traceparent=parent)]
    async with serving(model_of(tiny), spans=asked_for.scope) as draft:
        answers = (await draft.stub.Propose(pb.ProposeRequest(items=requests))).answers
    assert [answer.WhichOneof("outcome") for answer in answers] == ["result", "status"]
    assert asked_for.names == []
