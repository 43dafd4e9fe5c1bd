"""What a target says to a trace: a span per item until its first result, and one per pass with links."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from services.common.pb.galley.v1 import galley_pb2 as pb
from tests.target.items import slice_of
from tests.target.stream import stream_of

if TYPE_CHECKING:
    from opentelemetry import trace

    from services.common.pb.galley.v1 import galley_pb2_grpc as rpc

TRACE, PARENT = 0xABC, 0xDEF
PARENT_OF = f"00-{TRACE:032x}-{PARENT:016x}-01"


@pytest.fixture
def exported() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exported: InMemorySpanExporter) -> trace.Tracer:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exported))
    return provider.get_tracer("test")


async def test_an_item_is_a_span_and_every_pass_names_its_sessions(
    target: rpc.TargetAsyncStub, exported: InMemorySpanExporter
) -> None:
    async with stream_of(target) as stream:
        await stream.send(
            pb.VerifyItem(slice=slice_of([5, 9, 2, 33], traceparent=PARENT_OF), draft_tokens=[1], credit=2)
        )
        answers = await stream.until_last()
    spans = exported.get_finished_spans()
    (item,) = [span for span in spans if span.name == "galley.v1.Target/Verify"]
    assert item.parent is not None
    assert (item.parent.trace_id, item.parent.span_id, item.kind) == (TRACE, PARENT, SpanKind.SERVER)
    steps = [span for span in spans if span.name == "target.step"]
    assert len(steps) == len(answers) > 1
    for step in steps:
        assert [(link.context.trace_id, link.context.span_id) for link in step.links] == [(TRACE, PARENT)]
        assert step.attributes is not None
        assert step.attributes["galley.batch_sessions"] == 1
    assert steps[0].attributes is not None
    assert steps[0].attributes["galley.rows"] == 5
