"""What a draft says to a trace: a span per item, and one per step with links to those that it took."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from services.common.pb.galley.v1 import galley_pb2 as pb
from services.draft.strategies.model import ModelStrategy
from services.draft.strategies.steps import ModelSteps
from tests.draft.steps import item, serving
from tests.target.tiny import load_tiny_model

if TYPE_CHECKING:
    from pathlib import Path

TRACES = {"a": 0xABC, "b": 0xABD}


async def test_an_item_is_a_span_and_every_step_names_its_sessions(tiny: Path) -> None:
    exported = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exported))
    asked = [
        item([5, 9, 2], k, name, traceparent=f"00-{TRACES[name]:032x}-{1:016x}-01")
        for name, k in (("a", 3), ("b", 1))
    ]
    strategy = ModelStrategy(ModelSteps(load_tiny_model(tiny, kv_blocks=64)))
    async with serving(strategy, tracer=provider.get_tracer("test")) as draft:
        await draft.stub.Propose(pb.ProposeRequest(items=asked))
    spans = exported.get_finished_spans()
    items = [span for span in spans if span.name == "galley.v1.Draft/Propose"]
    assert {span.context.trace_id for span in items} == set(TRACES.values())
    assert {span.kind for span in items} == {SpanKind.SERVER}
    steps = [span for span in spans if span.name == "draft.step"]
    linked = [{link.context.trace_id for link in step.links} for step in steps]
    assert linked == [set(TRACES.values()), {TRACES["a"]}, {TRACES["a"]}]
    assert [step.attributes and step.attributes["galley.batch_sessions"] for step in steps] == [2, 1, 1]
