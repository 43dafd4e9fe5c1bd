"""Storms of valid HTTP requests: replays, forged event ids, streams that are left, reads of sessions."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Iterable, Sequence

from tests.attack import storms as grpc_storms
from tests.attack.stack import BAD, METERED
from tests.attack.storms import CRAFTED_STOPS, TEXTS
from tests.fakes.http_client import BODY, Events, HttpClient, http_client
from tests.fakes.waiting import PATIENCE_S

COMPLETIONS = "/v1/completions"
ENDS = {200, 400, 404, 409, 429, 503}
"""Statuses of a storm of resumes; forged hashes end 500 with the code `data_loss`, too."""


async def counted(calls: Iterable[Awaitable[int]]) -> Counter[int]:
    async with asyncio.timeout(3 * PATIENCE_S):
        return Counter(await asyncio.gather(*calls))


def _events(session_id: str) -> str:
    return f"/v1/sessions/{session_id}/events"


async def _status(client: HttpClient, path: str, headers: Sequence[tuple[bytes, bytes]] = ()) -> int:
    """Return the status of a stream, of which nothing but that is read."""
    async with client.raw.stream("GET", path, headers=list(headers)) as response:
        return int(response.status_code)


async def replays(address: str, tokens: int, at_once: int, rounds: int) -> Counter[int]:
    """Make an answer with crafted stop strings, and read it again from its beginning many times."""
    results: Counter[int] = Counter()
    async with http_client(address, x_api_key=BAD) as client:
        body = BODY | {"max_tokens": tokens, "stop": CRAFTED_STOPS, "logprobs": 1}
        whole = await client.stream(COMPLETIONS, body)
        assert whole.is_done

        async def replay() -> int:
            async with client.raw.stream("GET", _events(whole.session_id)) as response:
                again = Events()
                if response.status_code == 200:
                    await again.listen(response)
                    assert not again.is_done or again.text() == whole.text(), "another answer"
                return int(response.status_code)

        for _ in range(rounds):
            results += await counted(replay() for _ in range(at_once))
    return results


def _forged(last_id: str) -> list[str]:
    at, _, seen = last_id.partition(".")
    return [
        *("~", "0", "1", f"{at}.{seen[::-1]}", f"{int(at) - 1}.{seen}", f"{int(at) + 1}.{seen}"),
        *(f"999999999.{seen}", f"{last_id}!", ",".join(["~"] * 9), "~," * 4000, f"{last_id},~"),
        *("\u0663", "1.", ".", "!", "done!", "-1.A", "1" * 5000, f"{last_id} x"),
    ]


async def forged_ids(address: str, rounds: int) -> Counter[int]:
    """Resume a running stream, and an unknown one, with ids that no gateway has sent."""
    results: Counter[int] = Counter()
    async with http_client(address, x_api_key=BAD) as client:
        for _ in range(rounds):
            events = Events()
            async with client.open(COMPLETIONS, BODY | {"max_tokens": 1000}) as response:
                await events.listen(response, until=3)
                forged = _forged(events.last_id)
                for session_id in (events.session_id, "0" * 32, "%00", "x" * 5000):
                    path = _events(session_id)
                    asked = [[(b"last-event-id", one.encode())] for one in forged]
                    results += await counted(_status(client, path, one) for one in asked)
    return results


async def resumes(address: str, at_once: int, rounds: int) -> Counter[int]:
    """Start many streams at once, then resume each three times, while it runs."""
    results: Counter[int] = Counter()
    async with http_client(address, x_api_key=BAD) as client:
        for _ in range(rounds):
            begun: list[str] = []
            results += await counted(_begin(client, begun) for _ in range(at_once))
            results += await counted(_status(client, _events(one)) for one in begun * 3)
    return results


async def _begin(client: HttpClient, begun: list[str]) -> int:
    async with client.open(COMPLETIONS, BODY | {"max_tokens": 1000}) as response:
        if session_id := response.headers.get("x-galley-session-id"):
            begun.append(session_id)
        return int(response.status_code)


async def cancels(address: str, sessions: int, tokens: int) -> tuple[int, float]:
    """Start and leave sessions, then resume each; return the tokens that came, and the seconds it took."""
    began_s, delivered, begun = time.monotonic(), 0, []
    body = BODY | {"max_tokens": tokens, "return_token_ids": True}
    async with http_client(address, x_api_key=METERED) as client:
        for _ in range(sessions):
            async with client.open(COMPLETIONS, body) as response:
                if response.status_code == 200:
                    begun.append(response.headers["x-galley-session-id"])
                else:
                    assert response.status_code == 429
                    assert int(response.headers["retry-after"]) >= 1
            # The gateway gives back what a cancelled call has not used once it has noticed.
            await asyncio.sleep(0.02)
        for session_id in begun:
            events = Events()
            async with client.raw.stream("GET", _events(session_id)) as response:
                if response.status_code == 200:
                    await events.listen(response)
            if events.events and '"error"' in events.events[-1].data:
                events.events.pop()
            delivered += len(events.tokens())
    return delivered, time.monotonic() - began_s


async def reads(address: str, tokens: int, at_once: int) -> Counter[int]:
    """Ask for the state of a long session, and end it, many times at once."""
    async with http_client(address, x_api_key=BAD) as client:
        whole = await client.stream(COMPLETIONS, BODY | {"max_tokens": tokens})
        path = f"/v1/sessions/{whole.session_id}"

        async def call(method: str) -> int:
            return int((await client.raw.request(method, path)).status_code)

        return await counted(call(method) for method in ["GET", "DELETE"] * at_once)


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
