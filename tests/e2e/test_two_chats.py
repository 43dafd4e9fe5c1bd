"""Two chats of a whole stack are two traces at a collector, each one tree under the span of its call."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path
from typing import Any

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from galley.client.client import AsyncClient
from galley.core.names import DRAFT_BATCH, NGRAM, ROUND, VERIFY, VERIFY_BATCH
from galley.stack.stack import Stack, StackOptions
from tests.fakes.otlp_http import collecting_http
from tests.fakes.tiny_model import save_tiny_model

CHAT = "text_completion tiny"


async def test_two_chats_are_two_traces(tmp_path: Path) -> None:
    spans: list[Span] = []

    def take(_signal: str, request: Any, _context: Any) -> None:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                spans.extend(scope.spans)

    with collecting_http(take) as address:
        options = StackOptions(
            model=str(save_tiny_model(tmp_path / "tiny")),
            draft_model="none",
            strategy=NGRAM,
            dtype="float32",
            env={
                "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{address}",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
                "OTEL_METRICS_EXPORTER": "none",
            },
        )
        async with Stack(options) as stack, AsyncClient(stack.address("gateway")) as client:
            prompts = [5, 9, 2, 33, 5, 9], [7, 4, 7, 4, 7]
            await asyncio.gather(*(client.generate(ids, max_tokens=30, ignore_eos=True) for ids in prompts))
    # The processes have stopped in order, so they have exported all.
    traces: dict[bytes, list[Span]] = defaultdict(list)
    for span in spans:
        traces[span.trace_id].append(span)
    assert len(traces) == 2
    for one in traces.values():
        roots = [span for span in one if not span.parent_span_id]
        assert [(span.name, span.kind) for span in roots] == [(CHAT, Span.SPAN_KIND_SERVER)]
        assert {span.parent_span_id for span in one} <= {b"", *(span.span_id for span in one)}
        assert all(span.kind != Span.SPAN_KIND_UNSPECIFIED for span in one)
    assert {ROUND, VERIFY, VERIFY_BATCH, DRAFT_BATCH} <= {span.name for span in spans}
