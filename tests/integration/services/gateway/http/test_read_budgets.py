"""Reads of stored sessions over HTTP are charged, also those that are refused; in debt nothing is read."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.http_client import BODY, HttpClient
from tests.fakes.world import World
from tests.integration.services.gateway.callers import KeyFile
from tests.integration.services.gateway.http.test_choice_limits import COMPLETIONS, calling, limiting

BURST = 400
LIMITED = KeyFile(alice=f"tokens_per_s = 0.001\nburst_tokens = {BURST}")
RESPONSE = {"input": "x", "max_output_tokens": 50, "seed": 1, "ignore_eos": True}


async def respond(client: HttpClient) -> dict[str, Any]:
    response = await client.post("/v1/responses", RESPONSE)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/responses/resp_{id}/input_items", 200),
        ("/v1/responses/resp_{id}?stream=true&starting_after=57", 204),
        ("/v1/responses/resp_{id}?stream=true&starting_after=58", 400),
        ("/v1/sessions/{id}/events?last_event_id=nonsense", 400),
    ],
)
async def test_a_read_costs_the_tokens_of_the_log(world: World, path: str, status: int) -> None:
    gateway = await limiting(world, LIMITED)
    async with calling(gateway) as client:
        response = await respond(client)
        for _ in range(3):
            read = await client.raw.get(path.format(id=response["id"].removeprefix("resp_")))
            assert read.status_code == status, read.text
        await gateway.idle()
        left = BURST - response["usage"]["total_tokens"] - 3 * 50
        refused = await client.post(COMPLETIONS, BODY | {"max_tokens": left + 1})
        assert refused.status_code == 429
        assert (await client.post(COMPLETIONS, BODY | {"max_tokens": left})).status_code == 200


async def test_a_position_in_a_response_costs_a_second_read(world: World) -> None:
    gateway = await limiting(world, LIMITED)
    async with calling(gateway) as client:
        response = await respond(client)
        read = await client.raw.get(f"/v1/responses/{response['id']}?stream=true&starting_after=20")
        assert "event: response.incomplete" in read.text
        await gateway.idle()
        left = BURST - response["usage"]["total_tokens"] - 2 * 50
        refused = await client.post(COMPLETIONS, BODY | {"max_tokens": left + 1})
        assert refused.status_code == 429
        assert (await client.post(COMPLETIONS, BODY | {"max_tokens": left})).status_code == 200


async def test_a_caller_in_debt_can_end_its_sessions_but_not_read_them(world: World) -> None:
    gateway = await limiting(world, LIMITED)
    async with calling(gateway) as client:
        ids = [(await respond(client))["id"].removeprefix("resp_") for _ in range(2)]
        await client.post(COMPLETIONS, BODY | {"prompt": "x" * BURST, "max_tokens": 1})
        for path in (
            f"/v1/responses/resp_{ids[0]}/input_items",
            f"/v1/responses/resp_{ids[0]}",
            f"/v1/responses/resp_{ids[0]}?stream=true&starting_after=57",
            f"/v1/sessions/{ids[0]}",
            f"/v1/sessions/{ids[0]}/events",
        ):
            # The gateway knows of the debt for a second.
            assert (await client.post(COMPLETIONS, BODY | {"max_tokens": 1})).status_code == 429
            assert (await client.raw.get(path)).status_code == 429, path
        assert (await client.post(COMPLETIONS, BODY | {"max_tokens": 1})).status_code == 429
        assert (await client.post(f"/v1/responses/resp_{ids[1]}/cancel", {})).status_code == 200
        assert (await client.raw.delete(f"/v1/sessions/{ids[0]}")).status_code == 200
        assert (await client.raw.delete(f"/v1/responses/resp_{ids[1]}")).status_code == 200
