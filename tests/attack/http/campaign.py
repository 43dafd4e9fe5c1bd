"""The long form of the attacks over HTTP, a part of `make prove-attacks`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from random import Random

from tests.attack.http import bodies, raw, storms
from tests.attack.stack import BAD, MAX_MESSAGE_BYTES, METERED_BURST, files_allowed
from tests.fakes.http_client import http_client

_CHANGED, _AT_ONCE = 20_000, 8
_SEED = 20261126
STATUSES = {200, 204, 400, 401, 404, 405, 408, 413, 429, 431}
"""Statuses that any bytes may get."""

Expect = Callable[[bool, str], None]
Part = Callable[[], Awaitable[None]]


def http_parts(address: str, expect: Expect, connections: int) -> dict[str, Part]:
    """Return the attacks by name; each tells `expect` what must hold, and the fault if it does not."""
    attacks = _Attacks(address, expect)
    return {
        "HTTP: changed bytes": attacks.changed_bytes,
        "HTTP: malformed requests": attacks.malformed,
        "HTTP: header bombs": attacks.header_bombs,
        "HTTP: bodies": attacks.bodies,
        "HTTP: slow requests": attacks.slow,
        "HTTP: unread responses": attacks.unread,
        "HTTP: storms": attacks.storms,
        "HTTP: idle connections": lambda: attacks.idle(connections),
    }


class _Attacks:
    def __init__(self, address: str, expect: Expect) -> None:
        self._address = address
        self._expect = expect

    async def changed_bytes(self) -> None:
        requests = raw.noise(Random(_SEED), _CHANGED)

        async def send() -> None:
            for data in requests:
                got = set(await raw.statuses(self._address, data))
                self._expect(got <= STATUSES, f"HTTP {got} after {data!r}")

        await asyncio.gather(*(send() for _ in range(_AT_ONCE)))

    async def malformed(self) -> None:
        for name, data in raw.malformed():
            got = await raw.statuses(self._address, data, stays=True)
            self._expect(got == [400], f"HTTP {got} after {name}")

    async def header_bombs(self) -> None:
        for name in raw.BOMBS:
            for _ in range(100):
                got = await raw.statuses(self._address, raw.header_bomb(name))
                self._expect(got == [431], f"HTTP {got} after headers: {name}")

    async def bodies(self) -> None:
        kind = {"content-type": "application/json"}
        async with http_client(self._address, x_api_key=BAD) as client:
            for name, path, body in bodies.refused():
                response = await client.raw.post(path, content=body, headers=kind)
                self._expect(response.status_code == 400, f"HTTP {response.status_code} after {name}")

    async def slow(self) -> None:
        async with AsyncExitStack() as opened:
            await raw.slow_requests(self._address, opened, 500)

    async def unread(self) -> None:
        async with AsyncExitStack() as opened:
            await raw.unread(self._address, opened, 10, max_tokens=300, logprobs=20)
            await raw.unread_responses(self._address, opened, 200)
            await asyncio.sleep(5)

    async def storms(self) -> None:
        address = self._address
        replayed = await storms.replays(address, tokens=900, at_once=8, rounds=5)
        self._expect(replayed["done"] >= 5, f"HTTP replays end {replayed}")
        self._expect(replayed.keys() <= storms.REPLAYED, f"HTTP replays end {replayed}")
        ends = await storms.resumes(address, at_once=40, rounds=5)
        ends += await storms.resumes(address, at_once=4, rounds=10)
        self._expect(ends.keys() <= storms.RESUMED, f"HTTP resumes end {ends}")
        ends = await storms.reads(address, tokens=900, at_once=50)
        self._expect(ends.keys() <= {200, 429}, f"HTTP reads end {ends}")
        ends = await storms.logprobs(address, tokens=900, at_once=2)
        self._expect(ends.keys() == {200}, f"HTTP requests for logprobs end {ends}")
        ends = await storms.texts(address, MAX_MESSAGE_BYTES - 1024, 16)
        self._expect(ends.keys() <= {400}, f"HTTP texts end {ends}")
        forged = await storms.forged_ids(address, rounds=5)
        self._expect(forged.keys() == storms.FORGED, f"HTTP resumes with forged ids end {forged}")
        ends = await storms.bad_credentials(address, rounds=100)
        self._expect(ends.keys() == {401}, f"HTTP bad credentials end {ends}")
        await storms.cancels(address, sessions=100, tokens=METERED_BURST // 2)

    async def idle(self, connections: int) -> None:
        """Open idle connections; the server closes those beyond its limit at once."""
        async with AsyncExitStack() as opened:
            await raw.idle(self._address, opened, min(connections, files_allowed() - 500))
