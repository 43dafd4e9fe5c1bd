"""Time and size limits of HTTP connections."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from galley.common.config.settings import ServerLimits
from services.gateway.http.api.schemas import ChatRequest, CompletionRequest
from services.gateway.http.api.tokens import DetokenizeRequest, TokenizeRequest
from services.gateway.http.responses.schemas import ResponseRequest
from services.gateway.http.transport import server
from services.gateway.settings import GatewaySettings
from tests.attack.http.raw import completion, peer
from tests.fakes.waiting import PATIENCE_S
from tests.fakes.world import World

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n"
WRONG: list[tuple[type[BaseModel], str]] = [
    (CompletionRequest, '{"prompt": [1, %s "x"]}'),
    (CompletionRequest, '{"prompt": "", "stop": [%s 1]}'),
    (CompletionRequest, '{"prompt": "", "stop_token_ids": ["", %s 1]}'),
    (ChatRequest, '{"messages": [%s 1]}'),
    (ChatRequest, '{"messages": [{"role": "user", "content": [%s 1]}]}'),
    (ResponseRequest, '{"input": [%s 1]}'),
    (ResponseRequest, '{"input": [{"role": "user", "content": [%s 1]}]}'),
    (TokenizeRequest, '{"messages": [%s 1]}'),
    (DetokenizeRequest, '{"tokens": ["", %s 1]}'),
]
WRONG_ENTRIES: list[tuple[type[BaseModel], dict[str, Any], str]] = [
    (CompletionRequest, {"prompt": ""}, "logit_bias"),
    (ChatRequest, {"messages": []}, "logit_bias"),
    (ResponseRequest, {"input": ""}, "logit_bias"),
    (ResponseRequest, {"input": ""}, "metadata"),
]


@pytest.mark.parametrize(("model", "body"), WRONG)
def test_a_list_is_checked_up_to_its_first_wrong_entry(model: type[BaseModel], body: str) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(json.loads(body % ("1," * 100_000)))
    assert len(caught.value.errors()) <= 4


@pytest.mark.parametrize(("model", "body", "name"), WRONG_ENTRIES)
def test_an_object_is_checked_up_to_its_first_wrong_entry(
    model: type[BaseModel], body: dict[str, Any], name: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate({**body, name: {str(index): [] for index in range(8000)}})
    assert len(caught.value.errors()) == 1


async def test_a_body_that_never_comes_is_refused_in_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GatewaySettings, "server_limits", lambda _: ServerLimits(request_timeout_s=0.2))
    gateway = await world.gateway(http_port=0)
    async with peer(gateway.http) as attacker:
        await attacker.send(HEAD + b"\r\n{")
        assert b" 408 " in await attacker.head()


async def test_a_body_in_tiny_chunks_is_refused(world: World) -> None:
    gateway = await world.gateway(http_port=0)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
    async with peer(gateway.http) as attacker:
        await attacker.send(head + b"\r\n" + b"1\r\nx\r\n" * 300)
        assert b" 400 " in await attacker.head()
    body = b'{"prompt": "x", "seed": 1, "max_tokens": 4' + b" " * 40_000 + b"}"
    chunks = [body[at : at + 400] for at in range(0, len(body), 400)]
    async with peer(gateway.http) as client:
        whole = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
        await client.send(head + b"content-type: application/json\r\n\r\n" + whole + b"0\r\n\r\n")
        assert b" 200 " in await client.head()


async def test_calls_that_need_no_key_have_no_body(world: World) -> None:
    gateway = await world.gateway(http_port=0)
    async with peer(gateway.http) as attacker:
        await attacker.send(b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 4000\r\n\r\n")
        assert b" 413 " in await attacker.head()


async def test_a_connection_serves_many_requests_and_ends_when_idle(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.KEEP_ALIVE_S == 75, "as docs/http.md says"
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.5)
    gateway = await world.gateway(http_port=0)
    health = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    async with peer(gateway.http) as client, asyncio.timeout(PATIENCE_S):
        for request in (
            health,
            completion(),
            completion(prompt=[]),
            b"GET /none HTTP/1.1\r\nhost: x\r\n\r\n",
        ):
            await client.send(request)
            [length] = re.findall(rb"content-length: (\d+)", await client.head())
            await client.reader.readexactly(int(length))
        sent_s = time.monotonic()
        await client.send(completion(stream=True, max_tokens=5))
        assert (await client.reader.readuntil(b"\r\n0\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert await client.reader.read() == b""
        assert time.monotonic() - sent_s >= 0.5


async def test_an_old_connection_ends_with_its_next_response(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    age_s = 0.5
    monkeypatch.setattr(GatewaySettings, "server_limits", lambda _: ServerLimits(max_connection_age_s=age_s))
    gateway = await world.gateway(http_port=0)
    began_s = time.monotonic()
    async with peer(gateway.http) as client, asyncio.timeout(PATIENCE_S):
        head = b""
        while b"connection: close" not in head.lower():
            await client.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            head = await client.head()
            [length] = re.findall(rb"content-length: (\d+)", head)
            await client.reader.readexactly(int(length))
        assert time.monotonic() - began_s >= age_s
        assert not await client.reader.read()


async def test_the_body_of_a_refused_request_is_not_awaited_for_ever(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GatewaySettings, "server_limits", lambda _: ServerLimits(handshake_timeout_s=0.3))
    gateway = await world.gateway(http_port=0)
    async with peer(gateway.http) as attacker, asyncio.timeout(PATIENCE_S):
        await attacker.send(HEAD + b"x-galley-timeout-s: soon\r\n\r\n")
        assert b" 400 " in await attacker.head()
        while await attacker.send(b" "):  # noqa: ASYNC110  # a client that sends slowly
            await asyncio.sleep(0.05)
