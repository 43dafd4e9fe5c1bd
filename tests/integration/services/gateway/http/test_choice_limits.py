"""Requests for several answers: admitted as one, or refused for good where they can never fit."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest

from tests.fakes.http_client import BODY, Events, HttpClient, http_client
from tests.fakes.truth import CONTEXT
from tests.fakes.world import Gateway, World
from tests.integration.services.gateway.callers import ALICE, BOB, KeyFile

COMPLETIONS = "/v1/completions"


async def limiting(world: World, key_file: KeyFile, **given: Any) -> Gateway:
    """Return a gateway of the test's own pool: the pool's gateways share the token budgets."""
    pool = f"test-{world.id}"
    directory = world.directory / uuid4().hex
    directory.mkdir()
    keys = key_file.write_to(directory)
    return await world.gateway(api_keys_file=keys, pool=pool, http_port=0, **given)


@asynccontextmanager
async def calling(gateway: Gateway, key: str = ALICE) -> AsyncIterator[HttpClient]:
    async with http_client(gateway.http, authorization=f"Bearer {key}") as client:
        yield client


@pytest.mark.parametrize(
    ("given", "param", "problem"),
    [
        ({"n": 5}, "n", "must be <= 4 (most streams of one caller), got 5"),
        ({"n": 5, "prompt": ["x", "y"]}, "n", "must be <= 4 (most streams of one caller), got 5"),
        (
            {"n": 2, "prompt": ["x"] * 3},
            "prompt",
            "must have <= 2 entries with n=2 (4 streams of one caller at most), got 3",
        ),
    ],
)
async def test_more_answers_than_places_are_refused_for_good(
    world: World, given: dict[str, Any], param: str, problem: str
) -> None:
    gateway = await limiting(world, KeyFile(alice="max_sessions = 4", bob="max_sessions = 9"), max_sessions=6)
    async with calling(gateway) as alice, calling(gateway, BOB) as bob:
        response = await alice.post(COMPLETIONS, BODY | given)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert error["message"] == f"{param}: {problem}"
        assert "retry-after" not in response.headers
        assert len((await alice.complete(n=4))["choices"]) == 4
        assert len((await bob.complete(n=6))["choices"]) == 6, "nobody waits for a slot"
        assert (await bob.post(COMPLETIONS, BODY | {"n": 7})).status_code == 400


async def test_a_stored_request_of_more_answers_than_places_cannot_be_resumed(world: World) -> None:
    wide = await limiting(world, KeyFile())
    narrow = await limiting(world, KeyFile(), max_sessions=2)
    async with calling(wide) as client, calling(narrow) as other:
        body = await client.complete(n=3)
        session_id = body["id"].removeprefix("cmpl-")
        response = await other.raw.get(f"/v1/sessions/{session_id}/events")
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "session_id")
        assert "must have <= 2 answers" in error["message"]


BURST = KeyFile(alice="tokens_per_s = 0.001\nburst_tokens = 60")


async def test_a_full_budget_admits_all_answers_of_a_request(world: World) -> None:
    gateway = await limiting(world, BURST)
    async with calling(gateway) as client:
        choices = (await client.complete(n=3, max_tokens=30))["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["length"] * 3
        await gateway.idle()
        refused = await client.post(COMPLETIONS, BODY)
        assert refused.status_code == 429, "the answers have used the budget up"


async def test_prompts_before_one_that_is_refused_cost_their_tokens(world: World) -> None:
    gateway = await limiting(world, BURST)
    async with calling(gateway) as client:
        body = BODY | {"prompt": ["x" * 10, "x" * 20], "max_tokens": CONTEXT - 15}
        assert (await client.post(COMPLETIONS, body)).status_code == 400
        await gateway.idle()
        left = 60 - 10 - 20
        assert (await client.post(COMPLETIONS, BODY | {"max_tokens": left + 1})).status_code == 429
        await client.complete(max_tokens=left)


async def test_what_answers_do_not_use_is_returned(world: World) -> None:
    gateway = await limiting(world, BURST)
    async with calling(gateway) as client:
        body = {"prompt": "x", "max_tokens": 1, "n": 2}
        assert len((await client.complete(**body))["choices"]) == 2
        await gateway.idle()
        left = 60 - 2 * (1 + 1)
        refused = await client.post(COMPLETIONS, BODY | body | {"max_tokens": left // 2 + 1})
        assert refused.status_code == 429
        assert f"for {left + 2} tokens" in refused.json()["error"]["message"]
        assert len((await client.complete(**body | {"max_tokens": left // 2}))["choices"]) == 2


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
async def test_tools_are_translated_once_their_request_is_admitted(world: World, path: str) -> None:
    function = {"name": "f", "parameters": {"type": "object", "description": "x" * (1 << 16)}}
    is_chat = path.endswith("completions")
    body: dict[str, Any] = {
        "tools": [{"type": "function", **({"function": function} if is_chat else function)}],
        "tool_choice": "required",
        **({"messages": [{"role": "user", "content": "x"}]} if is_chat else {"input": "x"}),
    }
    gateway = await limiting(world, BURST, max_message_bytes=1 << 20)
    async with calling(gateway) as client:
        most = "max_tokens" if is_chat else "max_output_tokens"
        admitted = await client.post(path, {**body, most: 60})
        assert (admitted.status_code, admitted.json()["error"]["param"]) == (400, "tools")
        assert "must be at most 65536 bytes" in admitted.json()["error"]["message"]
        await gateway.idle()
        await client.complete(max_tokens=30)  # the refused request used nothing
        await gateway.idle()
        assert (await client.post(path, {**body, most: 60})).status_code == 429


async def test_a_full_budget_lets_all_answers_of_a_request_resume(world: World) -> None:
    body = BODY | {"n": 3, "max_tokens": 30, "return_token_ids": True}
    first = await limiting(world, KeyFile(), draft="none")
    second = await limiting(world, BURST, draft="none")
    async with calling(first) as client, calling(second) as other:
        whole = await client.stream(COMPLETIONS, body)
        events = Events()
        world.target.gate.close_after(3)
        async with client.open(COMPLETIONS, body) as response:
            await events.listen(response, until=1)
        world.target.gate.open()
        await first.idle()
        await other.resume(events)
        assert events.is_done
        assert [events.tokens(index) for index in range(3)] == [whole.tokens(index) for index in range(3)]
