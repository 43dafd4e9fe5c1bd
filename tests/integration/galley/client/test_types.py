"""The types that a program which calls the client is checked against.

mypy checks this file in `make lint`: `assert_type` states a type, and an ignore without need is an error.
The same lines run, so that what the types refuse is refused at run time too.
"""

from __future__ import annotations

from typing import assert_type

import pytest
from pydantic import BaseModel, TypeAdapter

from galley import (
    AsyncClient,
    AsyncStream,
    AuditCounts,
    AuditReport,
    Client,
    GenerateOptions,
    Message,
    Result,
    Speculation,
    SpeculationUsage,
    Stream,
    TokenLogprobs,
    Usage,
)
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.gateway import FakeChunk, FakeGateway, serving


def test_the_synchronous_client() -> None:
    with serving(FakeGateway()) as address, Client(address) as client:
        result = assert_type(client.generate("x", max_tokens=4, temperature=0, stop="END"), Result)
        assert_type(client.chat([{"role": "user", "content": "x"}], speculation="off"), Result)
        stream = assert_type(client.stream([1, 2], speculation=Speculation(k=2), stop=["a"]), Stream)
        assert [assert_type(event, pb.StreamEvent) for event in stream]
        assert_type(stream.result(), Result)
        assert_type(client.audit(result.session_id), AuditReport)
        assert_type(client.audit_counts(), AuditCounts)
    assert_type(result.text, str)
    assert_type(result.tokens, list[int])
    assert_type(result.usage, Usage)
    assert_type(result.speculation, SpeculationUsage)
    assert_type(result.logprobs, list[TokenLogprobs])
    assert_type(result.message, Message)


async def test_the_asynchronous_client() -> None:
    with serving(FakeGateway()) as address:
        async with AsyncClient(address) as client:
            assert_type(await client.generate("x", seed=7, logprobs=1), Result)
            assert_type(await client.chat("x", timeout_s=20.0), Result)
            stream = assert_type(client.stream([Message("user", "x")]), AsyncStream)
            assert [assert_type(event, pb.StreamEvent) async for event in stream]
            assert_type(await stream.result(), Result)


def test_a_conversation_grows() -> None:
    with serving(FakeGateway()) as address, Client(address) as client:
        history = [Message("user", "x")]
        history.append(client.chat(history).message)
        plain: list[dict[str, str]] = [{"role": "user", "content": "x"}]
        mixed: list[Message | dict[str, str]] = [*plain, client.chat(plain).message]
        options: GenerateOptions = {"max_tokens": 4, "temperature": 0.0}
        assert client.chat(mixed, **options).text == "Hello, world!\n"


def test_what_the_types_refuse_is_refused() -> None:
    with Client("127.0.0.1:1") as client:
        with pytest.raises(TypeError, match="temperature"):
            client.generate("x", temprature=0.5)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="max_tokens"):
            client.stream("x", max_tokens="16")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="stop"):
            client.generate("x", stop=b"x")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="speculation"):
            client.generate("x", speculation="ngram")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="prompt"):
            client.generate(["x"])  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="messages"):
            client.chat([1, 2])  # type: ignore[list-item]
        with pytest.raises(TypeError, match="messages"):
            client.chat(5)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="retries"):
            Client("127.0.0.1:1", retries=3)  # type: ignore[arg-type]


def test_a_schema_is_a_dict_a_model_or_an_adapter() -> None:
    class Answer(BaseModel):
        number: int

    chunk = FakeChunk((1,), '{"number": 7}')
    with serving(FakeGateway((chunk,))) as address, Client(address) as client:
        for schema in (Answer, TypeAdapter(Answer)):
            assert client.generate("x", schema=schema).parsed == Answer(number=7)
        plain: dict[str, object] = {"type": "object"}
        assert client.generate("x", schema=plain, prediction=[1, 2]).parsed == {"number": 7}
        assert client.generate("x", schema=Answer, prediction="7").parsed == Answer(number=7)
        with pytest.raises(TypeError, match="schema"):
            client.generate("x", schema=int)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="choice"):
            client.generate("x", choice=5)  # type: ignore[arg-type]
