"""Storms of calls: replays, stop strings, texts, cancels, resumes, bad credentials, and damaged logs."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Iterable, Sequence
from hashlib import sha256
from itertools import repeat
from typing import Any

import grpc
from redis.asyncio import Redis

from galley.client.client import NO_RETRIES, AsyncClient, AsyncStream, GalleyRpcError
from galley.client.errors import rpc_error
from galley.common.wire.codec import grammar_message
from galley.core.grammar.spec import GrammarSpec
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from tests.attack.bystander import GOOD
from tests.attack.stack import BAD, EXPIRED, MAX_MESSAGE_BYTES, METERED
from tests.fakes.changed_logs import CHANGES, change
from tests.fakes.truth import SEED, true_output
from tests.fakes.waiting import PATIENCE_S
from tests.fakes.world import PROMPT, PROMPT_TOKENS

_PROMPT = "Go on."
CRAFTED_STOPS = tuple(letter + "e " * 127 for letter in "abcdeghilmnorstu")
"""As many and as long as a request may have, all different; beginnings of them are in every answer."""
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
ENDS_OF_CHANGED_LOGS = {"OK", "DATA_LOSS", "NOT_FOUND"}
"""A session that is gone after its stream has ended is not found; a test beside the gateway is exact."""
NOBODY = "nobody-7c19e4d2"
Metadata = tuple[tuple[str, str], ...]
UNAUTHENTICATED: dict[str, Metadata] = {
    "no key": (),
    "an empty key": (("x-api-key", ""),),
    "an empty bearer": (("authorization", "Bearer "),),
    "another scheme": (("authorization", f"Basic {GOOD}"),),
    "an unknown key": (("x-api-key", NOBODY),),
    "an expired key": (("authorization", f"Bearer {EXPIRED}"),),
    "a name instead of its key": (("x-api-key", "good"),),
    "a key that is longer": (("x-api-key", GOOD + "0"),),
    "a key that is shorter": (("x-api-key", GOOD[:-1]),),
    "a key in another case": (("x-api-key", GOOD.upper()),),
    "two keys": (("authorization", f"Bearer {GOOD},{BAD}"),),
    "a good key, and then a bad one": (("x-api-key", GOOD), ("x-api-key", NOBODY)),
    "a bad key, and then a good one": (("x-api-key", NOBODY), ("x-api-key", GOOD)),
    "a bad bearer, and then a good one": (
        ("authorization", f"Bearer {NOBODY}"),
        ("authorization", f"Bearer {GOOD}"),
    ),
    "the same bearer twice": (("authorization", f"Bearer {GOOD}"),) * 2,
    "another scheme, and then a good bearer": (
        ("authorization", "Basic eDp5"),
        ("authorization", f"Bearer {GOOD}"),
    ),
    "a good bearer, and two keys": (
        ("authorization", f"Bearer {GOOD}"),
        ("x-api-key", GOOD),
        ("x-api-key", NOBODY),
    ),
    "a hash instead of its key": (("x-api-key", sha256(GOOD.encode()).hexdigest()),),
    "a key of 4,000 bytes": (("x-api-key", GOOD + "x" * 4000),),
}


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


async def tokens_of(stream: AsyncStream) -> list[int]:
    async for _ in stream:
        pass
    return stream.tokens


async def replays(address: str, tokens: int, at_once: int, rounds: int) -> Counter[str]:
    """Make an answer with crafted stop strings, and resume it from its beginning many times."""
    async with storm_client(address) as client:
        stream = client.stream(
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
            return tokens_of(client.stream(_PROMPT, max_tokens=tokens, ignore_eos=True, stop=CRAFTED_STOPS))

        results = [await ends(generate() for _ in range(at_once)) for _ in range(rounds)]
    return sum(results, Counter())


async def tokenizer_bomb(address: str, name: str, at_once: int) -> Counter[str]:
    """Send texts as large as a message may be, all beyond the context window."""
    piece = TEXTS[name]
    text = piece * ((MAX_MESSAGE_BYTES - 1024) // len(piece.encode()))
    async with storm_client(address) as client:
        return await ends(tokens_of(client.stream(one)) for one in repeat(text, at_once))


async def resumes(address: str, at_once: int, rounds: int) -> Counter[str]:
    """Start many streams at once, then resume each that started three times, while it runs."""
    results: Counter[str] = Counter()
    async with storm_client(address) as client:
        for _ in range(rounds):
            streams = [client.stream(_PROMPT, max_tokens=1000, ignore_eos=True) for _ in range(at_once)]
            results += await ends(anext(stream) for stream in streams)
            started = [stream.session_id for stream in streams if stream.session_id]
            again = [client.resume(session_id) for session_id in started * 3]
            results += await ends(anext(stream) for stream in again)
            for stream in (*streams, *again):
                stream.cancel()
    return results


async def cancels(address: str, sessions: int, tokens: int) -> tuple[int, float]:
    """Start and cancel sessions, and resume each; return the tokens that came, and the seconds it took."""
    began_s, delivered = time.monotonic(), 0
    async with storm_client(address, METERED) as client:
        for _ in range(sessions):
            stream = client.stream(_PROMPT, max_tokens=tokens, ignore_eos=True)
            if await _end(anext(stream)) == "OK":
                stream.cancel()
                delivered += await _resumed(client, stream.session_id)
    return delivered, time.monotonic() - began_s


async def _resumed(client: AsyncClient, session_id: str) -> int:
    """Return how many tokens the rest of a session has."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            resumed = client.resume(session_id)
            if await _end(tokens_of(resumed)) == "OK":
                return len(resumed.tokens)
            # The gateway gives back what a cancelled call has not used once it has noticed.
            await asyncio.sleep(0.02)


async def grammars(
    address: str, specs: Sequence[GrammarSpec], at_once: int, max_tokens: int = 2
) -> Counter[str]:
    """Send a request with each grammar."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = rpc.GenerationStub(channel)

        async def generate(spec: GrammarSpec) -> None:
            grammar = grammar_message(spec)
            request = pb.GenerateRequest(text=_PROMPT, max_tokens=max_tokens, structured_output=grammar)
            try:
                async for _ in stub.Generate(request, metadata=(("x-api-key", BAD),), timeout=PATIENCE_S):
                    pass
            except grpc.RpcError as error:
                raise rpc_error(error) from error

        groups = [specs[at : at + at_once] for at in range(0, len(specs), at_once)]
        results = [await ends(generate(spec) for spec in group) for group in groups]
    return sum(results, Counter())


async def bad_credentials(address: str, rounds: int) -> Counter[str]:
    """Call with every kind of bad credentials, all kinds at once."""
    request = pb.GetModelInfoRequest().SerializeToString()
    async with grpc.aio.insecure_channel(address) as channel:
        call: Any = channel.unary_unary("/galley.v1.Generation/GetModelInfo")

        async def end(metadata: Metadata) -> str:
            try:
                await call(request, metadata=metadata, timeout=PATIENCE_S)
            except grpc.RpcError as error:
                return str(error.code().name)
            return "OK"

        results: Counter[str] = Counter()
        for _ in range(rounds):
            results += Counter(await asyncio.gather(*(end(each) for each in UNAUTHENTICATED.values())))
    return results


async def changed_logs(address: str, store: str, tokens: int) -> Counter[str]:
    """Change the log of a stream in every way, then resume it; fail on a wrong token."""
    truth = true_output(PROMPT_TOKENS, tokens)
    results: Counter[str] = Counter()
    async with storm_client(address) as client, Redis.from_url(store) as raw:
        for name in CHANGES:
            stream = client.stream(PROMPT, max_tokens=tokens, seed=SEED, ignore_eos=True)
            while len(stream.tokens) < 4:
                await anext(stream)
            await change(raw, stream.session_id, name)
            results[await _end(tokens_of(stream))] += 1
            resumed = client.resume(stream.session_id)
            results[await _end(tokens_of(resumed))] += 1
            for received in (stream.tokens, resumed.tokens):
                assert received == truth[: len(received)], f"{name}: a wrong token"
    return results
