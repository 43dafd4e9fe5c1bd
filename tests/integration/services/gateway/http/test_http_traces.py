"""Spans and log lines of HTTP requests."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from galley.core import names
from tests.fakes.http_client import BODY, CHAT, Events, http_client
from tests.fakes.spans import KeptSpans, attributes_of, error_of, parent_of
from tests.fakes.world import World, receive, refused


async def test_choices_are_spans_of_one_trace(world: World) -> None:
    kept = KeptSpans()
    gateway = await world.gateway_of(kept.parts(), http_port=0)
    async with http_client(gateway.http, traceparent=parent_of(0xABC)) as client:
        answer = await client.chat(n=3)
        spans = await kept.requests(3)
    assert {span.context.trace_id for span in spans} == {0xABC}
    assert {span.name for span in spans} == {"chat tiny"}
    first = next(span for span in spans if attributes_of(span)[names.SESSION_ID] in answer["id"])
    for span in spans:
        of = attributes_of(span)
        assert (of[names.HTTP_METHOD], of[names.HTTP_ROUTE]) == ("POST", "/v1/chat/completions")
        assert (of[names.HTTP_STATUS], error_of(span)) == (200, None)
        assert names.RPC_STATUS not in of
        assert span.parent is not None
        assert span.parent.span_id == (0xDEF if span is first else first.context.span_id)


async def test_refused_requests_have_a_span_with_their_status(world: World) -> None:
    kept = KeptSpans()
    gateway = await world.gateway_of(kept.parts(), http_port=0)
    async with http_client(gateway.http) as client:
        await client.post("/v1/completions", BODY | {"temperature": -1.0})
        await client.post("/v1/completions", BODY | {"n": 0})
    refused = await kept.requests(2)
    for span, field in zip(refused, ("temperature", "n"), strict=True):
        assert (attributes_of(span)[names.HTTP_STATUS], error_of(span)) == (400, "invalid_argument")
        assert attributes_of(span)[names.FIELD] == field
        assert (span.status.description or "").startswith(f"{field}: must be ")
        assert "got" not in (span.status.description or "")


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("grammar", "root ::= secret\n"),
        ("grammar", "start: secret"),
        ("regex", "(secret"),
        ("schema", {"type": "secret"}),
    ],
)
async def test_a_refused_grammar_is_neither_logged_nor_traced(world: World, kind: str, given: Any) -> None:
    kept = KeptSpans()
    gateway = await world.gateway_of(kept.parts(), http_port=0)
    options: dict[str, Any] = {kind: given}
    by_http = {"structured_outputs": {"json" if kind == "schema" else kind: given}}
    with capture_logs() as logs:
        async with http_client(gateway.http) as client:
            response = await client.post("/v1/completions", BODY | {"ignore_eos": False} | by_http)
        error = await refused(receive(gateway.generate(ignore_eos=False, **options)))
        spans = await kept.requests(2)
    assert "secret" in response.json()["error"]["message"]
    assert "secret" in error.message
    assert len([line for line in logs if line["event"] == "call finished"]) == 2
    assert "secret" not in repr(logs)
    for span in spans:
        assert (span.status.description or "").startswith("structured_output")
        assert "secret" not in repr((span.status.description, attributes_of(span)))


async def test_the_status_of_a_span_is_the_one_that_was_sent(world: World) -> None:
    kept = KeptSpans()
    gateway = await world.gateway_of(kept.parts(), http_port=0, drain_timeout_s=1)
    async with http_client(gateway.http) as client:
        unknown = await client.post("/v1/completions", BODY | {"model": "other"})
        large = await client.raw.post("/v1/completions", content=b"x" * (1 << 17))
        world.target.gate.close_after(3)
        events = Events()
        async with client.open("/v1/completions", BODY | {"max_tokens": 400}) as response:
            await events.listen(response, until=2)
            await gateway.running.stop()
            await events.listen(response)
    assert events.error["code"] == "unavailable"
    sent = [one.status_code for one in (unknown, large, response)]
    spans = await kept.requests(3)
    assert [attributes_of(span)[names.HTTP_STATUS] for span in spans] == sent == [404, 413, 200]


async def test_each_choice_is_logged_once_with_the_request_id(world: World) -> None:
    gateway = await world.gateway(http_port=0)
    with capture_logs(processors=[merge_contextvars]) as logs:
        async with http_client(gateway.http, x_request_id="mine") as client:
            await client.chat(n=2)
            await client.post("/v1/chat/completions", CHAT | {"n": 0})
            await client.raw.get("/v1/models")
            await client.raw.get("/health")
            await client.raw.get("/nowhere")
    *finished, refused, models, nowhere = [line for line in logs if line["event"] == "call finished"]
    assert [(line["reason"], line["status"]) for line in finished] == [("length", "ok")] * 2
    assert len({line["session_id"] for line in finished}) == 2
    assert {line["method"] for line in (*finished, refused)} == {"POST /v1/chat/completions"}
    assert (refused["status"], refused["field"]) == ("invalid_argument", "n")
    assert (models["status"], models["method"]) == ("ok", "GET /v1/models")
    assert (nowhere["status"], nowhere["method"]) == ("not_found", "GET /nowhere")
    assert {line["log_level"] for line in (*finished, refused, models, nowhere)} == {"info"}


async def test_a_response_and_its_later_stream_have_a_span_each(world: World) -> None:
    kept = KeptSpans()
    gateway = await world.gateway_of(kept.parts(), http_port=0)
    async with http_client(gateway.http) as client:
        body = (await client.post("/v1/responses", {"input": "Tell me.", "max_output_tokens": 5})).json()
        path = f"/v1/responses/{body['id']}"
        assert (await client.raw.get(f"{path}?stream=true&starting_after=3")).status_code == 200
        assert (await client.raw.get(path)).status_code == 200
        spans = await kept.requests(2)
    of = [attributes_of(span) for span in spans]
    assert [(one[names.HTTP_METHOD], one[names.HTTP_ROUTE]) for one in of] == [
        ("POST", "/v1/responses"),
        ("GET", "/v1/responses/{response_id}"),
    ]
    assert {one[names.SESSION_ID] for one in of} == {body["id"].removeprefix("resp_")}
    assert [one[names.HTTP_STATUS] for one in of] == [200, 200]
