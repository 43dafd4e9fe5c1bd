"""Bad input: its status, field and bound; no work is done for it, and other sessions do not notice."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import grpc
import pytest

from galley.client.errors import rpc_error
from galley.client.options import Speculation
from galley.core.content import prefix_hash
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from tests.fakes.truth import CONTEXT, VOCAB
from tests.fakes.world import (
    MAX_TOKENS,
    PROMPT,
    Gateway,
    Received,
    World,
    field_of,
    must_be_true,
    receive,
    refused,
)

INVALID = grpc.StatusCode.INVALID_ARGUMENT
MAX_BYTES = 1 << 16
UNKNOWN = "0" * 32


# Each further field is tested in unit/services/gateway/test_validation.py.
BAD_REQUESTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "no prompt": ({}, "input", "one of text, messages, token_ids"),
    "a role that the template refuses": (
        {"messages": pb.ChatMessages(messages=[pb.ChatMessage(role="robot", content="hello")])},
        "messages",
        "only users and assistants speak here",
    ),
    "an answer beyond the context window": (
        {"text": PROMPT, "max_tokens": CONTEXT - len(PROMPT) + 1},
        "max_tokens",
        f"context window: {CONTEXT}",
    ),
    "a temperature that is no number": (
        {"text": PROMPT, "sampling": pb.SamplingParams(temperature=math.nan)},
        "sampling.temperature",
        "finite and >= 0",
    ),
    "an unknown model": ({"text": PROMPT, "model": "other"}, "model", "'tiny'"),
    "an unknown strategy": (
        {"text": PROMPT, "speculation": pb.Speculation(strategy="guess")},
        "speculation.strategy",
        "model, ngram",
    ),
    "a token id outside the vocabulary": (
        {"token_ids": pb.TokenIds(ids=[1, VOCAB])},
        "token_ids.ids[1]",
        f"[0, {VOCAB})",
    ),
    "a schema that no grammar can check": (
        {"text": PROMPT, "structured_output": {"json_schema": '{"uniqueItems": true}'}},
        "structured_output.json_schema",
        'Unimplemented keys: ["uniqueItems"]',
    ),
    "a grammar without its end": (
        {"text": PROMPT, "structured_output": {"regex": "a*"}, "ignore_eos": True},
        "ignore_eos",
        "must be unset with structured_output",
    ),
    "an oversized message": (
        {"text": "x" * MAX_BYTES},
        "GenerateRequest",
        f"at most {MAX_BYTES} bytes, got {MAX_BYTES + 4}",
    ),
}


class Bystander:
    def __init__(self, world: World, gateway: Gateway) -> None:
        self._world = world
        self._gateway = gateway
        self.received = Received()

    async def __aenter__(self) -> None:
        self._world.target.gate.close_after(2)
        self._stream = self._gateway.generate(speculation=Speculation(off=True))
        await self.received.listen(self._stream, until=1)
        await self._world.target.called(3)
        self._calls = len(self._world.target.calls), len(self._world.draft.calls)

    async def __aexit__(self, *_: object) -> None:
        assert (len(self._world.target.calls), len(self._world.draft.calls)) == self._calls
        self._world.target.gate.open()
        must_be_true(await self.received.listen(self._stream))


async def generate(gateway: Gateway, request: pb.GenerateRequest | bytes) -> list[pb.StreamEvent]:
    async with grpc.aio.insecure_channel(gateway.address) as channel:
        call: Any
        if isinstance(request, bytes):
            send: Any = channel.unary_stream("/galley.v1.Generation/Generate")
            call = send(request)
        else:
            call = rpc.GenerationStub(channel).Generate(request)
        try:
            return [response.event async for response in call]
        except grpc.RpcError as error:
            raise rpc_error(error) from error


@pytest.mark.parametrize(("request_", "field", "bound"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
async def test_bad_input_names_its_field_and_bound(
    world: World, request_: dict[str, Any], field: str, bound: str
) -> None:
    gateway = await world.gateway(max_message_bytes=MAX_BYTES)
    async with Bystander(world, gateway):
        error = await refused(generate(gateway, pb.GenerateRequest(**request_)))
        assert error.code is INVALID
        [(named, problem)] = error.violations
        assert named == field
        assert bound in problem
        assert field in error.message


@pytest.mark.parametrize(
    "data",
    [
        b"\x12\x02\xff\xfe",
        b"\x0a\x01\x80\x12\x01a",
        b"\x1a\x0d\x0a\x05\x0a\x01u\x12\x00\x0a\x04\x12\x02\xc3\x28",
        b"\x12\x01a\x42\x01b\x42\x01\xff",
    ],
    ids=["text", "model", "messages.messages[1].content", "stop[1]"],
)
async def test_invalid_utf8_names_the_message(world: World, gateway: Gateway, data: bytes) -> None:
    async with Bystander(world, gateway):
        error = await refused(generate(gateway, data))
        assert error.code is INVALID
        assert field_of(error) == "GenerateRequest"
        assert "UTF-8" in error.message


async def test_an_unknown_session_is_not_found(world: World, gateway: Gateway) -> None:
    async with Bystander(world, gateway):
        for session_id in (UNKNOWN, "no id at all", "g" * 32):
            error = await refused(receive(gateway.client.resume(session_id, 0)))
            assert error.code is grpc.StatusCode.NOT_FOUND
            assert "session_id" in error.message
            assert (await refused(gateway.client.abort(session_id))).code is grpc.StatusCode.NOT_FOUND


async def test_resume_needs_a_session_id_and_a_whole_hash(world: World, gateway: Gateway) -> None:
    async with Bystander(world, gateway):
        error = await refused(receive(gateway.client.resume("", 0)))
        assert (error.code, field_of(error)) == (INVALID, "session_id")
        error = await refused(receive(gateway.client.resume(UNKNOWN, 1, b"short")))
        assert (error.code, field_of(error)) == (INVALID, "seen_hash")
        assert "16 bytes" in error.message


async def test_the_same_key_with_another_body_already_exists(world: World) -> None:
    gateways = await world.gateway(), await world.gateway()
    key = f"key-{world.id}-body"
    must_be_true(await receive(gateways[0].generate(idempotency_key=key)))
    for gateway in gateways:
        calls = len(world.target.calls)
        error = await refused(receive(gateway.generate(idempotency_key=key, max_tokens=MAX_TOKENS + 1)))
        assert error.code is grpc.StatusCode.ALREADY_EXISTS
        assert "idempotency_key" in error.message
        assert len(world.target.calls) == calls


async def test_a_session_is_resumable_after_its_deadline(world: World, gateway: Gateway) -> None:
    world.target.gate.close_after(2)
    stream = gateway.generate(timeout_s=1.5)
    received = Received()
    error = await refused(received.listen(stream))
    assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await world.target.was_cancelled()
    await gateway.idle()
    world.target.gate.open()
    must_be_true(await received.listen(gateway.client.resume_stream(stream)))


async def test_a_resume_with_other_tokens_seen_is_data_loss(gateway: Gateway) -> None:
    stream = gateway.generate()
    received = await receive(stream)
    for index in (1, MAX_TOKENS):
        seen = [*received.tokens[: index - 1], received.tokens[index - 1] + 1]
        error = await refused(receive(gateway.client.resume(stream.session_id, index, prefix_hash(seen))))
        assert error.code is grpc.StatusCode.DATA_LOSS
    right = prefix_hash(received.tokens[:1])
    rest = await receive(gateway.client.resume(stream.session_id, 1, right), first_index=1)
    assert rest.tokens == received.tokens[1:]


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "under way"])
async def test_a_resume_beyond_any_possible_end_is_refused(world: World, finished: bool) -> None:
    gateway = await world.gateway()
    stream = gateway.generate()
    if finished:
        must_be_true(await receive(stream))
    else:
        world.target.gate.close()
        await anext(stream)
    resumed = gateway.client.resume(stream.session_id, MAX_TOKENS + 1)
    error = await refused(receive(resumed))
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    ((field, problem),) = error.violations
    assert field == "next_index"
    assert str(MAX_TOKENS) in problem


async def test_the_largest_request_that_fits_is_served(world: World) -> None:
    gateway = await world.gateway(max_message_bytes=MAX_BYTES)
    text = "x" * (CONTEXT - 64)
    for prompt in (text, list(text.encode())):
        received = await receive(gateway.generate(prompt, max_tokens=64))
        assert received.finished is not None
        assert len(received.tokens) == 64


async def test_model_info_tells_the_bounds(world: World) -> None:
    gateway = await world.gateway(max_sessions=3)
    async with asyncio.timeout(30):
        info = await gateway.client.model_info("tiny")
    assert (info.context_window, info.vocab_size, info.max_draft_tokens) == (CONTEXT, VOCAB, 16)
    assert (info.max_sessions, list(info.strategies)) == (3, ["model", "ngram"])
    assert (info.tokenizer_hash, info.fingerprint) == (world.tokenizer_hash, "build-1")
    assert (await refused(gateway.client.model_info("other"))).code is INVALID
