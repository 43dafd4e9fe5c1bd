"""LoRA adapters over HTTP: they are models, by their own name or after the served model's."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.fakes.http_client import CHAT, HttpClient, http_client
from tests.fakes.world import Gateway, World

NAMES = ["sql", "tiny:sql"]


@pytest.fixture
async def gateway(world: World) -> Gateway:
    world.target.lora_adapters = ("sql", "fr")
    return await world.gateway(http_port=0)


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[HttpClient]:
    async with http_client(gateway.http) as client:
        yield client


async def test_adapters_are_listed_as_models(client: HttpClient) -> None:
    listed = (await client.raw.get("/v1/models")).json()["data"]
    assert [(model["id"], model["parent"]) for model in listed] == [
        ("tiny", None),
        ("fr", "tiny"),
        ("sql", "tiny"),
    ]
    for name in NAMES:
        assert (await client.raw.get(f"/v1/models/{name}")).json() == listed[2]
    assert (await client.raw.get("/v1/models/tiny")).json() == listed[0]


@pytest.mark.parametrize("name", NAMES)
async def test_an_adapter_answers_as_a_model(world: World, client: HttpClient, name: str) -> None:
    answers = [await client.chat(model=name), await client.complete(model=name)]
    response = await client.post("/v1/responses", {"model": name, "input": "hi", "max_output_tokens": 4})
    events = await client.stream("/v1/chat/completions", CHAT | {"model": name})
    models = [body["model"] for body in (*answers, response.json(), events.events[0].json)]
    assert models == ["sql"] * 4
    assert {call.lora for call in world.target.calls} == {"sql"}
    state = await client.raw.get(f"/v1/sessions/{events.session_id}")
    assert state.json()["model"] == "sql"
    assert (await client.post("/tokenize", {"model": name, "prompt": "h"})).json()["count"] == 1


async def test_an_unknown_adapter_is_an_unknown_model(world: World, client: HttpClient) -> None:
    for name in ("it", "tiny:it", "sql:tiny"):
        response = await client.post("/v1/chat/completions", CHAT | {"model": name})
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert error["message"] == f"model: must be 'tiny', a LoRA adapter of it or empty, got '{name}'"
        assert (await client.raw.get(f"/v1/models/{name}")).status_code == 404
    assert not world.target.calls
