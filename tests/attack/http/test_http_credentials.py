"""HTTP requests without a valid key, from other origins, and for sessions of another principal."""

from __future__ import annotations

from typing import Any

import pytest
from redis import asyncio as redis_asyncio

from tests.attack.bystander import GOOD
from tests.attack.http import raw, storms
from tests.attack.http.storms import UNAUTHENTICATED
from tests.attack.stack import BAD, EXPIRED, HTTP, Attacked, unharmed
from tests.attack.storms import NOBODY
from tests.fakes.http_client import BODY, Events, http_client

UNKNOWN = "0" * 32
PATHS = (
    *(("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models")),
    *(("GET", f"/v1/sessions/{UNKNOWN}"), ("DELETE", f"/v1/sessions/{UNKNOWN}"), ("GET", "/metrics")),
    *(("GET", f"/v1/sessions/{UNKNOWN}/events"), ("POST", "/tokenize"), ("POST", "/detokenize")),
    *(("POST", f"/v1/sessions/{UNKNOWN}/audit"), ("GET", "/v1/audit")),
    *(("POST", "/v1/responses"), ("GET", f"/v1/responses/resp_{UNKNOWN}"), ("GET", "/docs/nothing")),
    *(("GET", "/v1/nothing"), ("PUT", "/v1/models"), ("TRACE", "/v1/models"), ("OPTIONS", "/v1/completions")),
)


async def test_unauthenticated_requests_are_refused_before_any_work(stack: Attacked) -> None:
    async with unharmed(stack, HTTP):
        pass
    async with (
        redis_asyncio.Redis.from_url(stack.store) as store,
        http_client(stack.http) as client,
    ):
        before = await _commands(store)
        for headers in UNAUTHENTICATED.values():
            for method, path in PATHS:
                response = await client.raw.request(method, path, headers=list(headers), json=BODY)
                assert response.status_code == 401, f"{method} {path} {headers}"
                assert response.json()["error"]["type"] == "authentication_error"
                output = f"{response.text} {response.headers}"
                assert not [key for key in (GOOD, BAD, EXPIRED, NOBODY) if key in output]
        assert await _commands(store) == before


async def _commands(store: redis_asyncio.Redis) -> int:
    stats: dict[str, Any] = await store.info("commandstats")
    return sum(int(entry["calls"]) for name, entry in stats.items() if name != "cmdstat_info")


async def test_unauthenticated_request_is_refused_before_its_body(stack: Attacked) -> None:
    async with unharmed(stack, HTTP), raw.peer(stack.http) as attacker:
        await attacker.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 60000\r\n\r\n")
        assert (await attacker.head()).startswith(b"HTTP/1.1 401")


async def test_bad_and_repeated_credentials_block_no_other(stack: Attacked) -> None:
    async with unharmed(stack, HTTP):
        ends = await storms.bad_credentials(stack.http, rounds=10)
    assert ends == {401: 10 * len(UNAUTHENTICATED)}


@pytest.mark.parametrize("live", [True, False], ids=["under way", "finished"])
async def test_session_of_another_principal_is_answered_as_unknown(stack: Attacked, live: bool) -> None:
    async with (
        http_client(stack.http, x_api_key=GOOD) as owner,
        http_client(stack.http, x_api_key=BAD, x_request_id="same") as other,
    ):
        events = Events()
        body = BODY | {"prompt": "a secret", "max_tokens": 1000 if live else 1}
        async with owner.open("/v1/completions", body) as response:
            await events.listen(response, until=3 if live else None)
            theirs = events.session_id
            assert theirs
            for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/events"), ("POST", "/audit")):
                foreign, unknown = [
                    await other.raw.request(
                        method, f"/v1/sessions/{one}{path}", headers={"last-event-id": events.last_id}
                    )
                    for one in (theirs, UNKNOWN)
                ]
                if events.last_id == "done" and path == "/events":  # tells nothing of any session
                    assert foreign.status_code == unknown.status_code == 204
                    continue
                assert foreign.status_code == 404
                assert foreign.text.replace(theirs, UNKNOWN) == unknown.text, f"{theirs}: {foreign.text}"
                assert _lasting(foreign.headers) == _lasting(unknown.headers)
            if live:
                await events.listen(response, until=len(events.events) + 1)
                assert '"text"' in events.events[-1].data, "it goes on"


def _lasting(headers: Any) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name != "date"}


async def test_pages_of_other_origins_may_neither_call_nor_read(stack: Attacked) -> None:
    origins = (
        "https://evil.example",
        "null",
        f"http://{stack.http}.evil.example",
        f"https://{stack.http}",
        "*",
    )
    async with unharmed(stack, HTTP), http_client(stack.http, x_api_key=GOOD) as client:
        for origin in origins:
            asked = {"origin": origin, "access-control-request-method": "POST"}
            for method, path in (*PATHS, ("GET", "/health"), ("GET", "/openapi.json")):
                response = await client.raw.request(method, path, headers=asked, json=BODY)
                assert response.status_code == 403, f"{origin}: {method} {path}"
                assert not [name for name in response.headers if name.startswith("access-control-")]
