"""Storms of valid HTTP requests: replays, forged event ids, streams that are left, reads of sessions."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from typing import Any

from tests.attack import storms as grpc_storms
from tests.attack.stack import BAD, METERED_HTTP
from tests.attack.storms import CRAFTED_STOPS, TEXTS
from tests.fakes.http_client import BODY, CHAT, Events, HttpClient, http_client
from tests.fakes.truth import SEED
from tests.fakes.waiting import PATIENCE_S
from tests.fakes.world import PROMPT

COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
RESPONSE = {"input": PROMPT, "seed": SEED, "ignore_eos": True}
RESUMED = {200, 409, 429, 503}
"""Statuses of resumes that supersede one another."""
REPLAYED = {"done", "failed_precondition", "unavailable"}
"""Ends of replays that supersede one another."""
FORGED = {("malformed", 400), ("of other tokens", 500), ("of the stream", 200), ("of no session", 404)}
"""Kinds of forged event ids, with their statuses."""


async def counted(calls: Iterable[Awaitable[int]]) -> Counter[int]:
    async with asyncio.timeout(3 * PATIENCE_S):
        return Counter(await asyncio.gather(*calls))


def _events(session_id: str) -> str:
    return f"/v1/sessions/{session_id}/events"


async def _status(client: HttpClient, path: str, headers: Sequence[tuple[bytes, bytes]] = ()) -> int:
    """Return the status of a stream, of which nothing but that is read."""
    async with client.raw.stream("GET", path, headers=list(headers)) as response:
        return int(response.status_code)


async def replays(address: str, tokens: int, at_once: int, rounds: int) -> Counter[str]:
    """Make an answer with crafted stop strings, and read it again from its beginning many times."""
    results: Counter[str] = Counter()
    async with http_client(address, x_api_key=BAD) as client:
        body = BODY | {"max_tokens": tokens, "stop": CRAFTED_STOPS, "logprobs": 1}
        whole = await client.stream(COMPLETIONS, body)
        assert whole.is_done

        async def replay() -> str:
            again = Events()
            async with client.raw.stream("GET", _events(whole.session_id)) as response:
                if response.status_code != 200:
                    return str(json.loads(await response.aread())["error"]["code"])
                await again.listen(response)
            if not again.is_done:
                return str(again.error["code"])
            assert again.text() == whole.text(), "another answer"
            return "done"

        for _ in range(rounds):
            async with asyncio.timeout(3 * PATIENCE_S):
                results += Counter(await asyncio.gather(*(replay() for _ in range(at_once))))
    return results


def _forged(last_id: str) -> Iterator[tuple[str, str]]:
    at, _, seen = last_id.partition(".")
    for one in ("~", "0", f"{last_id}!", last_id):
        yield "of the stream", one
    for one in (f"{at}.{seen[::-1]}", f"{int(at) - 1}.{seen}"):
        yield "of other tokens", one
    malformed = ("1", f"999999999.{seen}", ",".join(["~"] * 9), "~," * 4000, f"{last_id},~", f"{last_id} x")
    for one in (*malformed, "\u0663", "1.", ".", "!", "done!", "-1.A", "1" * 5000):
        yield "malformed", one


async def forged_ids(address: str, rounds: int) -> Counter[tuple[str, int]]:
    """Resume a running stream, and sessions that do not exist, with ids that no gateway has sent."""
    results: Counter[tuple[str, int]] = Counter()
    async with http_client(address, x_api_key=BAD) as client:
        for _ in range(rounds):
            events = Events()
            async with client.open(COMPLETIONS, BODY | {"max_tokens": 1000}) as response:
                await events.listen(response, until=3)
                for kind, forged in _forged(events.last_id):
                    sent = [(b"last-event-id", forged.encode())]
                    results[kind, await _status(client, _events(events.session_id), sent)] += 1
                    for session_id in ("0" * 32, "%00", "x" * 5000):
                        results["of no session", await _status(client, _events(session_id), sent)] += 1
    return results


async def resumes(address: str, at_once: int, rounds: int) -> Counter[int]:
    """Start many streams at once, then resume each three times, while it runs."""
    results: Counter[int] = Counter()
    async with http_client(address, x_api_key=BAD) as client:
        for _ in range(rounds):
            session_ids: list[str] = []
            results += await counted(_begin(client, session_ids) for _ in range(at_once))
            results += await counted(_status(client, _events(one)) for one in session_ids * 3)
    return results


async def _begin(client: HttpClient, session_ids: list[str]) -> int:
    async with client.open(COMPLETIONS, BODY | {"max_tokens": 1000}) as response:
        if session_id := response.headers.get("x-galley-session-id"):
            session_ids.append(session_id)
        return int(response.status_code)


async def cancels(address: str, sessions: int, tokens: int) -> tuple[int, float]:
    """Start and leave sessions, and resume each; return the tokens that came, and the seconds it took."""
    began_s, delivered = time.monotonic(), 0
    body = BODY | {"max_tokens": tokens, "return_token_ids": True}
    async with http_client(address, x_api_key=METERED_HTTP) as client:
        for _ in range(sessions):
            async with client.open(COMPLETIONS, body) as response:
                if response.status_code != 200:
                    assert response.status_code == 429
                    assert int(response.headers["retry-after"]) >= 1
                    continue
            delivered += await _resumed(client, response.headers["x-galley-session-id"])
    return delivered, time.monotonic() - began_s


async def _resumed(client: HttpClient, session_id: str) -> int:
    """Return how many tokens the rest of a session has."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            async with client.raw.stream("GET", _events(session_id)) as response:
                if response.status_code == 200:
                    events = Events()
                    await events.listen(response)
                    return len(events.tokens())
                assert response.status_code in RESUMED
            # The gateway gives back what a cancelled call has not used once it has noticed.
            await asyncio.sleep(0.02)


async def reads(address: str, tokens: int, at_once: int) -> Counter[int]:
    """Ask for the state of a long session and for its response, and end it, many times at once."""
    async with http_client(address, x_api_key=BAD) as client:
        whole = await client.stream(RESPONSES, RESPONSE | {"max_output_tokens": tokens, "top_logprobs": 20})
        session, response = f"/v1/sessions/{whole.session_id}", f"{RESPONSES}/resp_{whole.session_id}"

        async def call(method: str, path: str) -> int:
            return int((await client.raw.request(method, path)).status_code)

        calls = [("GET", session), ("GET", response), ("DELETE", session), ("POST", f"{response}/cancel")]
        return await counted(call(*one) for one in calls * at_once)


async def logprobs(address: str, tokens: int, at_once: int) -> Counter[int]:
    """Ask for long answers with 20 logprobs a token, as events and in one piece, at once."""
    chat = CHAT | {"max_tokens": tokens, "logprobs": True, "top_logprobs": 20}
    response = RESPONSE | {"max_output_tokens": tokens, "top_logprobs": 20}
    completion = BODY | {"max_tokens": tokens, "logprobs": 20}
    async with http_client(address, x_api_key=BAD) as client:

        async def post(path: str, body: dict[str, Any]) -> int:
            return int((await client.post(path, body)).status_code)

        kinds = ((CHATS, chat), (RESPONSES, response), (COMPLETIONS, completion))
        streamed = [(path, body | {"stream": True}) for path, body in kinds]
        return await counted(post(*one) for one in (*kinds, *streamed) * at_once)


async def texts(address: str, size: int, at_once: int) -> Counter[int]:
    """Send texts beyond the context window, to answer or to tokenize."""
    results: Counter[int] = Counter()
    async with http_client(address, x_api_key=BAD) as client:

        async def post(path: str, text: str) -> int:
            return int((await client.post(path, {"prompt": text})).status_code)

        for piece in TEXTS.values():
            text = piece * (size // len(piece.encode("unicode_escape")) // 2)
            for path in (COMPLETIONS, "/tokenize"):
                results += await counted(post(path, text) for _ in range(at_once))
    return results


# httpx does not send a value that ends with a space.
UNAUTHENTICATED = {
    name: headers
    for name, headers in grpc_storms.UNAUTHENTICATED.items()
    if not any(value.endswith(" ") for _, value in headers)
}


async def bad_credentials(address: str, rounds: int) -> Counter[int]:
    """Call with every kind of bad credentials, all kinds at once."""
    results: Counter[int] = Counter()
    async with http_client(address) as client:

        async def call(headers: tuple[tuple[str, str], ...]) -> int:
            return int((await client.raw.get("/v1/models", headers=list(headers))).status_code)

        for _ in range(rounds):
            results += await counted(call(each) for each in UNAUTHENTICATED.values())
    return results
