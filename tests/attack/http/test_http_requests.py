"""Requests that are no HTTP, or could be divided in two ways, and bodies made to harm."""

from __future__ import annotations

from random import Random

import pytest

from tests.attack.http import bodies, raw
from tests.attack.http.campaign import STATUSES
from tests.attack.stack import BAD, HTTP, MAX_MESSAGE_BYTES, MIB, Attacked, unharmed
from tests.fakes.http_client import BODY, http_client

SEED = 20261126
JSON = {"content-type": "application/json"}


async def test_a_request_that_is_not_plain_is_refused_and_its_connection_closed(stack: Attacked) -> None:
    async with unharmed(stack, HTTP):
        for name, data in raw.malformed():
            assert (await raw.statuses(stack.http, data, stays=True)) == [400], name


async def test_pipelined_requests_are_answered_in_order_and_bodies_are_no_requests(stack: Attacked) -> None:
    async with unharmed(stack, HTTP):
        assert await raw.statuses(stack.http, raw.pipelined(50), stays=True) == [200] * 49 + [400, 200]


@pytest.mark.parametrize("name", raw.BOMBS)
async def test_a_header_bomb_is_refused_before_it_is_parsed(stack: Attacked, name: str) -> None:
    stack.forget_peak()
    async with unharmed(stack, HTTP) as before:
        for _ in range(4):
            assert await raw.statuses(stack.http, raw.header_bomb(name)) == [431]
        later = raw.header_bomb(name, after=raw.pipelined(2).replace(b"connection: close\r\n", b""))
        assert await raw.statuses(stack.http, later) == [200, 400, 200, 431]
    assert stack.peak_rss() - before.rss < 64 * MIB


async def test_changed_bytes_get_a_status_or_no_response(stack: Attacked) -> None:
    """Send 300 of them; `make prove-attacks` sends 20,000."""
    async with unharmed(stack, HTTP):
        for data in raw.noise(Random(SEED), 300):
            assert set(await raw.statuses(stack.http, data)) <= STATUSES, data


async def test_a_body_that_is_no_request_is_refused(stack: Attacked) -> None:
    stack.forget_peak()
    async with unharmed(stack, HTTP) as before, http_client(stack.http, x_api_key=BAD) as client:
        for name, path, body in bodies.refused():
            response = await client.raw.post(path, content=body, headers=JSON)
            assert response.status_code == 400, f"{name}: {response.status_code} {response.text[:200]}"
            assert len(response.content) < 1000, name
    assert stack.peak_rss() - before.rss < 64 * MIB


async def test_an_unusual_body_is_served(stack: Attacked) -> None:
    async with unharmed(stack, HTTP), http_client(stack.http, x_api_key=BAD) as client:
        for name, path, body in bodies.served():
            response = await client.raw.post(path, content=body, headers=JSON)
            assert response.status_code == 200, f"{name}: {response.text[:200]}"


@pytest.mark.parametrize("is_chunked", [False, True], ids=["with its length", "in chunks"])
async def test_a_body_beyond_the_bound_is_refused_and_not_kept(stack: Attacked, is_chunked: bool) -> None:
    body = b"[" + b" " * (20 * MIB)
    if is_chunked:
        framing, body = b"transfer-encoding: chunked", b"%x\r\n%s\r\n" % (len(body), body)
    else:
        framing = b"content-length: %d" % len(body)
    head = raw.completion().partition(b"content-length")[0] + framing + b"\r\n\r\n"
    stack.forget_peak()
    async with unharmed(stack, HTTP) as before:
        for _ in range(3):
            assert await raw.statuses(stack.http, head + body) == [413]
    assert stack.peak_rss() - before.rss < 32 * MIB


async def test_a_body_of_the_bound_is_read(stack: Attacked) -> None:
    async with unharmed(stack, HTTP), http_client(stack.http, x_api_key=BAD) as client:
        most = MAX_MESSAGE_BYTES - len(str(BODY)) - 80
        response = await client.post(raw.COMPLETIONS, BODY | {"safety_identifier": "u" * most})
        assert response.status_code == 200
