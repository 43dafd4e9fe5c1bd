"""Storms of valid calls by known principals: replays, stop strings, texts, cancels and resumes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Iterable
from itertools import repeat
from typing import TypeVar

from galley.client.client import NO_RETRIES, AsyncClient, GalleyRpcError, TokenStream
from tests.attack.stack import BAD, MAX_MESSAGE_BYTES, METERED
from tests.fakes.truth import SEED
from tests.fakes.waiting import PATIENCE_S

_PROMPT = "Go on."
CRAFTED_STOPS = tuple("a" * 120 + "e " * 60 + f"{number:015d}" for number in range(16))
"""As many and as long as a request may have; beginnings of them are in every answer."""
TEXTS = {
    "one letter": "a",
    "spaces": " ",
    "emoji": "😀",
    "accents on accents": "e\u0301\u0323",
    "control tokens": "<|end|>",
    "almost control tokens": "<|en",
    "right to left": "\u202eא",
    "zero width": "\u200b",
}
T = TypeVar("T")


def storm_client(address: str, key: str = BAD) -> AsyncClient:
    return AsyncClient(address, api_key=key, retries=NO_RETRIES)


async def ends(calls: Iterable[Awaitable[object]]) -> Counter[str]:
    """Return how many of the calls, all made at once, ended with each status."""
    return Counter(await asyncio.gather(*(_end(call) for call in calls)))


async def _end(call: Awaitable[object]) -> str:
    async with asyncio.timeout(3 * PATIENCE_S):
        try:
            await call
        except GalleyRpcError as error:
            return str(error.code.name)
    return "OK"


async def tokens_of(stream: TokenStream) -> list[int]:
    async for _ in stream:
        pass
    return stream.token_ids


async def replays(address: str, tokens: int, at_once: int, rounds: int) -> Counter[str]:
    """Make an answer with crafted stop strings, and resume it from its beginning many times."""
    async with storm_client(address) as client:
        stream = client.generate(
            _PROMPT, max_tokens=tokens, seed=SEED, ignore_eos=True, stop=CRAFTED_STOPS, logprobs=1
        )
        answer = await tokens_of(stream)

        async def replay() -> None:
            assert await tokens_of(client.resume(stream.session_id)) == answer, "another answer"

        results = [await ends(replay() for _ in range(at_once)) for _ in range(rounds)]
    return sum(results, Counter())


async def crafted_stops(address: str, tokens: int, at_once: int, rounds: int) -> Counter[str]:
    async with storm_client(address) as client:

        def generate() -> Awaitable[list[int]]:
            return tokens_of(client.generate(_PROMPT, max_tokens=tokens, ignore_eos=True, stop=CRAFTED_STOPS))

        results = [await ends(generate() for _ in range(at_once)) for _ in range(rounds)]
    return sum(results, Counter())


async def tokenizer_bomb(address: str, name: str, at_once: int) -> Counter[str]:
    """Send texts as large as a message may be, all beyond the context window."""
    piece = TEXTS[name]
    text = piece * ((MAX_MESSAGE_BYTES - 1024) // len(piece.encode()))
    async with storm_client(address) as client:
        return await ends(tokens_of(client.generate(one)) for one in repeat(text, at_once))


async def resumes(address: str, at_once: int, rounds: int) -> Counter[str]:
    """Resume one running session from many calls at once, each of which takes it from the one before."""
    results: Counter[str] = Counter()
    async with storm_client(address) as client:
        for _ in range(rounds):
            stream = client.generate(_PROMPT, max_tokens=200, ignore_eos=True)
            await anext(stream)
            results += await ends(tokens_of(client.resume(stream.session_id)) for _ in range(at_once))
            stream.cancel()
    return results


async def cancels(address: str, sessions: int, tokens: int) -> tuple[int, float]:
    """Start and cancel sessions, then resume each; return the tokens that came, and the seconds it took."""
    began_s, delivered, started = time.monotonic(), 0, []
    async with storm_client(address, METERED) as client:
        for _ in range(sessions):
            stream = client.generate(_PROMPT, max_tokens=tokens, ignore_eos=True)
            if await _end(anext(stream)) == "OK":
                stream.cancel()
                started.append(stream)
            # The gateway gives back what a cancelled call has not used once it has noticed.
            await asyncio.sleep(0.02)
        for stream in started:
            resumed = client.resume(stream.session_id)
            await _end(tokens_of(resumed))
            delivered += len(resumed.token_ids)
    return delivered, time.monotonic() - began_s
