"""Two gateways told at once to own one session: a contest whose log shows who wrote which token.

Each gateway has a target of its own, which says its own letter and nothing else. So the log of a session
tells who had it, token by token: had both extended it, or one that was fenced, the letters would be mixed.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import grpc
from redis.asyncio import Redis

from galley.client.client import AsyncClient, AsyncStream, GalleyRpcError
from galley.core.content import tokens_from_bytes
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.settings import NO_DRAFT
from tests.fakes.processes import gateway_process
from tests.fakes.replicas import FakeTarget
from tests.fakes.truth import SEED
from tests.fakes.waiting import PATIENCE_S
from tests.fakes.world import PROMPT, PROMPT_TOKENS, Received, World

LETTERS = b"ab"
LENGTH = 64
_PASS_S = 0.001


class Partial(FakeTarget):
    def __init__(self, world: World, letter: int) -> None:
        super().__init__(world.directory / chr(letter), world.tokenizer_hash)
        self.fingerprint = f"build-{chr(letter)}"
        self.pass_s = _PASS_S
        self._letter = letter

    def _verify(self, open_request: object, result: pb.VerifyResult) -> None:
        super()._verify(open_request, result)  # type: ignore[arg-type]  # the fake's own
        self._rewrite(open_request, result)

    def _rewrite(self, open_request: object, result: pb.VerifyResult) -> None:
        del result.tokens[1:]
        result.tokens[0] = self._letter
        tokens: list[int] = open_request.tokens  # type: ignore[attr-defined]  # the fake's own
        del tokens[result.position + 1 :]
        tokens[result.position] = self._letter


@dataclass
class Tally:
    rounds: int = 0
    handed_over: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Arena:
    clients: tuple[AsyncClient, AsyncClient]
    store: Redis

    async def contest(self, tally: Tally, *, under_way: bool) -> None:
        key = secrets.token_hex(8)
        before: list[asyncio.Task[_Outcome]] = []
        if under_way:
            stream = self._ask(0, key)
            async with asyncio.timeout(PATIENCE_S):
                await anext(stream)
            before = [asyncio.create_task(_listen(stream))]
            calls = [client.resume(stream.session_id, 0) for client in self.clients]
        else:
            calls = [self._ask(index, key) for index in (0, 1)]
        response = await asyncio.gather(*map(_listen, calls), *before)
        session_id = next(stream.session_id for stream in calls if stream.session_id)
        self._judge(tally, response, await self._output(session_id))

    def _ask(self, index: int, key: str) -> AsyncStream:
        options = {"max_tokens": LENGTH, "seed": SEED, "ignore_eos": True, "idempotency_key": key}
        return self.clients[index].stream(PROMPT, **options)  # type: ignore[arg-type]  # as a dict

    async def _output(self, session_id: str) -> list[int]:
        log = await self.store.get(f"galley:sessions:default:{{{session_id}}}:log")
        assert isinstance(log, bytes)
        return tokens_from_bytes(log)[len(PROMPT_TOKENS) :]

    def _judge(self, tally: Tally, reported: list[_Outcome], log: list[int]) -> None:
        tally.rounds += 1
        tally.handed_over += len(set(log)) > 1
        tally.outcomes.update(one.outcome for one in reported)
        faults = []
        if len(log) != LENGTH or set(log) - set(LETTERS):
            faults.append("the log is not the answer")
        if sum(a != b for a, b in pairwise(log)) > len(reported) - 1:
            faults.append("the log is interleaved")
        if not any(one.outcome == "finished" for one in reported):
            faults.append("nobody was told the end")
        if any(one.tokens != log[: len(one.tokens)] for one in reported):
            faults.append("a client was told what the log does not hold")
        if any(one.outcome not in {"finished", "fenced"} for one in reported):
            faults.append(f"a stream ended otherwise: {[one.outcome for one in reported]}")
        tally.faults += [f"{fault}: {bytes(log)!r}" for fault in faults]


@dataclass
class _Outcome:
    tokens: list[int]
    outcome: str


async def _listen(stream: AsyncStream) -> _Outcome:
    received = Received()
    try:
        await received.listen(stream)
    except GalleyRpcError as error:
        fenced = error.code is grpc.StatusCode.FAILED_PRECONDITION
        return _Outcome(received.tokens, "fenced" if fenced else error.code.name)
    return _Outcome(received.tokens, "finished" if received.finished else "cut")


@asynccontextmanager
async def arena(world: World, *, processes: bool = False) -> AsyncIterator[Arena]:
    async with AsyncExitStack() as stack:
        clients = []
        for letter in LETTERS:
            (world.directory / chr(letter)).mkdir()
            target = Partial(world, letter)
            await target.start()
            stack.push_async_callback(target.stop)
            flags = {"target": target.address, "draft": NO_DRAFT}
            if processes:
                log = world.directory / chr(letter) / "log"
                secret = {"GALLEY_GATEWAY_ID_SECRET": world.settings().id_secret.get_secret_value()}
                started = await stack.enter_async_context(gateway_process(world, log, secret, flags))
                address = started["address"]
            else:
                address = (await world.gateway(**flags)).address
            clients.append(await stack.enter_async_context(AsyncClient(address)))
        store = Redis.from_url(world.redis_url)
        stack.push_async_callback(store.aclose)
        yield Arena((clients[0], clients[1]), store)
