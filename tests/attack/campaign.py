"""A campaign of fuzzed messages against all ports, drawn from a seed, and its outcome."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc

from tests.attack.mutation import Mutator
from tests.attack.requests import Known, Rpc, rpcs, some_metadata
from tests.attack.stack import BAD, HEALTH
from tests.fakes.waiting import PATIENCE_S

_WORKERS = 8
_KEPT = 20
_SOON_S = 0.05
_REPLICAS = ("OK", "INVALID_ARGUMENT", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED")
_ALL = ("OK", "INVALID_ARGUMENT", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED", "NOT_FOUND")
DOCUMENTED: Mapping[str, Sequence[str]] = {
    "gateway": (
        *_ALL,
        *("UNAUTHENTICATED", "ALREADY_EXISTS", "FAILED_PRECONDITION", "DEADLINE_EXCEEDED", "DATA_LOSS"),
    ),
    "target": (*_REPLICAS, "NOT_FOUND"),
    "draft": (*_REPLICAS, "NOT_FOUND"),
    "collector": _ALL,
    HEALTH: ("OK", "INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED"),
}
"""The statuses of docs/errors.md that a call may end with; UNAVAILABLE would be a fault of the services."""


@dataclass
class Outcome:
    """The outcome of a campaign: `ends` counts the statuses of calls by RPC, `items` those of their items."""

    messages: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    items: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def blame(self, rpc: Rpc, what: str, sent: Sequence[bytes]) -> None:
        if len(self.faults) < _KEPT:
            self.faults.append(f"{rpc.name}: {what}, after {[data[:2000].hex() for data in sent]}")


class Campaign:
    def __init__(self, addresses: Mapping[str, str], seed: int) -> None:
        self.outcome = Outcome()
        self._addresses = addresses
        self.rpcs = rpcs()
        self._shares = [rpc.share for rpc in self.rpcs]
        self._randoms = [Random(f"{seed} {worker}") for worker in range(_WORKERS)]
        self._channels: dict[str, grpc.Channel] = {}

    async def run(self, messages: int) -> Outcome:
        until = self.outcome.messages + messages
        with ExitStack() as opened:
            for service, address in self._addresses.items():
                self._channels[service] = opened.enter_context(grpc.insecure_channel(address))
            async with asyncio.TaskGroup() as workers:
                for random in self._randoms:
                    workers.create_task(self._work(random, until))
        return self.outcome

    async def _work(self, random: Random, until: int) -> None:
        known, mutator = Known(), Mutator(random)
        while self.outcome.messages < until:
            [rpc] = random.choices(self.rpcs, self._shares)
            many = random.randint(1, 5) if rpc.method.client_streaming else 1
            sent = [mutator.bytes_of(rpc.make(random, known)) for _ in range(many)]
            self.outcome.messages += len(sent)
            await self._call(rpc, random, known, sent)

    async def _call(self, rpc: Rpc, random: Random, known: Known, sent: Sequence[bytes]) -> None:
        metadata = some_metadata(random)
        if rpc.service == "gateway" and random.random() < 0.95:
            metadata.append(("x-api-key", BAD))
        short_s = random.choice((0.001, 0.01, 0.1)) if random.random() < 0.03 else None
        leaves = rpc.method.name == "Watch" or random.random() < 0.15
        call = Call(self._channels[rpc.service], rpc, metadata, short_s or PATIENCE_S)
        end = await asyncio.to_thread(call.made, sent, leaves_after_s=_SOON_S if leaves else None)
        for data in call.answers:
            self._read(rpc, data, known, sent)
        self.outcome.ends[f"{rpc.name}: {end}"] += 1
        may_be = {*DOCUMENTED[rpc.service], *(("DEADLINE_EXCEEDED",) if short_s else ())}
        may_be |= {"CANCELLED"} if leaves else set()
        # A live log may hold fewer tokens than a fuzzed Resume names; then it is to be sent again.
        may_be |= {"UNAVAILABLE"} if rpc.method.name == "Resume" else set()
        if end not in may_be or (end == "DEADLINE_EXCEEDED" and not short_s):
            self.outcome.blame(rpc, f"ends {end}", sent)

    def _read(self, rpc: Rpc, data: bytes, known: Known, sent: Sequence[bytes]) -> None:
        answer: Any = rpc.read(data)
        if rpc.method.name in {"Generate", "Resume"} and answer.event.HasField("started"):
            known.learn(answer.event.started.session_id)
        for item in getattr(answer, "answers", ()):
            outcome = item.WhichOneof("outcome")
            code = _name(item.status.code) if outcome == "status" else str(outcome)
            self.outcome.items[f"{rpc.name}: {code}"] += 1
            if outcome is None or (outcome == "status" and code not in DOCUMENTED[rpc.service]):
                self.outcome.blame(rpc, f"an item ends {code} ({item.status.message})", sent)


class Call:
    """A call by gRPC's blocking client in a thread; grpc.aio loses the status of a stream that ends early."""

    def __init__(
        self,
        channel: grpc.Channel,
        rpc: Rpc,
        metadata: Sequence[tuple[str, str | bytes]],
        timeout_s: float,
    ) -> None:
        self.answers: list[bytes] = []
        self._channel = channel
        self._rpc = rpc
        self._options: Any = {"metadata": metadata, "timeout": timeout_s}
        self._over = threading.Event()

    def made(self, sent: Sequence[bytes], leaves_after_s: float | None) -> str:
        try:
            if not self._rpc.method.server_streaming:
                kind: Any = self._channel.unary_unary(self._rpc.path)
                self.answers.append(kind(sent[0], **self._options))
                return "OK"
            return self._streamed(sent, leaves_after_s)
        except grpc.RpcError as error:
            return str(error.code().name)
        finally:
            self._over.set()

    def _streamed(self, sent: Sequence[bytes], leaves_after_s: float | None) -> str:
        kinds: Any = self._channel
        if self._rpc.method.client_streaming:
            requests = self._requests(sent, ends=leaves_after_s is None)
            call = kinds.stream_stream(self._rpc.path)(requests, **self._options)
        else:
            call = kinds.unary_stream(self._rpc.path)(sent[0], **self._options)
        leaver = threading.Timer(leaves_after_s or 0, call.cancel)
        if leaves_after_s is not None:
            leaver.start()
        try:
            self.answers.extend(call)
        finally:
            leaver.cancel()
        return "OK"

    def _requests(self, sent: Sequence[bytes], *, ends: bool) -> Iterator[bytes]:
        yield from sent
        if not ends:
            self._over.wait()


def _name(code: int) -> str:
    return next((status.name for status in grpc.StatusCode if status.value[0] == code), f"code {code}")
