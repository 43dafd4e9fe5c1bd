"""Answers by a schema are parsed, whatever the schema is; usage and sources of a prediction are reported."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError, field_validator

from galley import AsyncClient, Client, SourceUsage, Usage
from galley.client.structured import parser_of
from galley.core.errors import Unavailable
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.gateway import FakeChunk, FakeGateway, serving
from tests.integration.galley.client.test_results import Call, both


class Order(BaseModel):
    product: str
    count: int

    @field_validator("count")
    @classmethod
    def _is_at_most_nine(cls, count: int) -> int:
        if count > 9:
            raise ValueError("too many")
        return count


SCHEMA = {"type": "object", "properties": {"product": {"type": "string"}, "count": {"type": "integer"}}}
TEXT = '{"product": "tea", "count": 3}'


def answering(text: str = TEXT, **fields: Any) -> FakeGateway:
    half = len(text) // 2
    return FakeGateway((FakeChunk((1, 2), text[:half]), FakeChunk((3,), text[half:])), stop="", **fields)


def schema_of(gateway: FakeGateway) -> Any:
    request = gateway.requests[0]
    assert isinstance(request, pb.GenerateRequest)
    return json.loads(request.structured_output.json_schema)


@both
@pytest.mark.parametrize("method", ["generate", "chat", "stream"])
@pytest.mark.parametrize(
    ("schema", "sent", "parsed"),
    [
        (SCHEMA, SCHEMA, {"product": "tea", "count": 3}),
        (Order, Order.model_json_schema(), Order(product="tea", count=3)),
        (TypeAdapter(dict[str, Any]), TypeAdapter(dict[str, Any]).json_schema(), json.loads(TEXT)),
    ],
    ids=["dict", "model", "adapter"],
)
def test_an_answer_by_a_schema_is_parsed(
    call: Call, method: str, schema: Any, sent: Any, parsed: Any
) -> None:
    gateway = answering()
    with serving(gateway) as address:
        result = call(address, method, "x", schema=schema)
    assert result.text == TEXT
    assert result.parsed == parsed
    assert type(result.parsed) is type(parsed)
    assert schema_of(gateway) == sent


async def test_an_answer_that_was_resumed_is_parsed_whole() -> None:
    broken = answering(error=Unavailable("draining"), fail_at=1, failures=1)
    with serving(broken) as address:
        async with AsyncClient(address) as client:
            assert (await client.generate("x", schema=Order)).parsed == Order(product="tea", count=3)
    assert [type(request) for request in broken.requests] == [pb.GenerateRequest, pb.ResumeRequest]


async def test_a_stream_that_is_resumed_later_is_parsed_whole() -> None:
    gateway = answering()
    with serving(gateway) as address:
        async with AsyncClient(address) as client:
            stream = client.stream("x", schema=Order)
            assert [(await anext(stream)).WhichOneof("event") for _ in range(2)] == ["started", "chunk"]
            stream.cancel()
            resumed = await client.resume_stream(stream).result()
    assert resumed.parsed == Order(product="tea", count=3)


@pytest.mark.parametrize("product", ["tea", "</think>"])
def test_the_json_after_the_reasoning_of_a_model_is_parsed(product: str) -> None:
    order = Order(product=product, count=3)
    for reasoning in ("", "<think>Three?</think>\n\n", "[THINK]Three?[/THINK]", "`</think>`?</think>"):
        with serving(answering(reasoning + order.model_dump_json())) as address, Client(address) as client:
            assert client.generate("x", schema=Order).parsed == order
            assert client.generate("x", schema=SCHEMA).parsed == order.model_dump()


@pytest.mark.parametrize("text", ["</think>" * 4000, "[" * 20_000])
def test_an_answer_that_is_no_json_is_refused_in_a_moment(text: str) -> None:
    parse = parser_of(SCHEMA)
    assert parse is not None
    began_s = time.thread_time()
    with pytest.raises(ValueError, match=r"."):
        parse(text)
    assert time.thread_time() - began_s < 1


def test_an_answer_that_was_cut_says_so_and_keeps_its_text() -> None:
    with (
        serving(answering(TEXT[:-4], reason=pb.Finished.REASON_LENGTH)) as address,
        Client(address) as client,
    ):
        result = client.generate("x", schema=Order)
    assert result.text == TEXT[:-4]
    with pytest.raises(
        ValueError, match=r"^parsed: the answer ended by 'length' after 3 tokens, before its JSON"
    ):
        _ = result.parsed


@pytest.mark.parametrize("reasoning", ["", "<think>Three?</think>", "<think>`</think>`?</think>"])
@pytest.mark.parametrize("cut", ['{"product": "</think>3', '{"product": "</think>", "note": "</think>{}'])
def test_the_end_of_an_answer_that_was_cut_is_not_its_value(reasoning: str, cut: str) -> None:
    gateway = answering(reasoning + cut, reason=pb.Finished.REASON_LENGTH)
    with serving(gateway) as address, Client(address) as client:
        result = client.generate("x", schema=SCHEMA)
    with pytest.raises(
        ValueError, match=r"^parsed: the answer ended by 'length' after 3 tokens, before its JSON"
    ):
        _ = result.parsed


def test_an_answer_that_ends_with_its_last_token_is_parsed() -> None:
    with serving(answering(reason=pb.Finished.REASON_LENGTH)) as address, Client(address) as client:
        assert client.generate("x", schema=SCHEMA).parsed == json.loads(TEXT)


def test_a_value_that_the_model_refuses_is_its_error() -> None:
    with serving(answering('{"product": "tea", "count": 12}')) as address, Client(address) as client:
        result = client.generate("x", schema=Order)
    with pytest.raises(ValidationError, match="too many"):
        _ = result.parsed


def test_an_answer_without_a_schema_is_not_parsed() -> None:
    with serving(answering()) as address, Client(address) as client:
        result = client.generate("x", regex=".*")
    with pytest.raises(ValueError, match=r"^parsed: requires a request with schema$"):
        _ = result.parsed


@both
def test_two_forms_are_refused_before_any_call(call: Call) -> None:
    gateway = FakeGateway()
    with (
        serving(gateway) as address,
        pytest.raises(ValueError, match="regex: cannot be combined with schema"),
    ):
        call(address, "generate", "x", schema=Order, regex="a")
    assert gateway.requests == []


@both
def test_usage_tells_predicted_tokens_and_sources_apart(call: Call) -> None:
    sources = (
        pb.SourceStats(source="prediction", drafted=3, verified=2, accepted=1),
        pb.SourceStats(source="model", drafted=1, verified=2, accepted=1),
    )
    gateway = answering(sources=sources, accepted_prediction_tokens=2)
    with serving(gateway) as address:
        result = call(address, "generate", "x", prediction="tea")
    assert result.usage == Usage(5, 3, accepted_prediction_tokens=2)
    assert result.speculation.sources == {
        "prediction": SourceUsage(drafted=3, verified=2, accepted=1),
        "model": SourceUsage(drafted=1, verified=2, accepted=1),
    }
    assert result.speculation.sources["prediction"].acceptance_rate == 0.5
