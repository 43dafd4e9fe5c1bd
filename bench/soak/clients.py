"""The clients of a soak: some read, leave and resume; some read slowly; some never read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import grpc

from bench.soak.requests import Manner, Mix, References, Visit
from galley.client.client import AsyncClient, GalleyRpcError
from galley.client.options import GenerateOptions, Message
from galley.client.request import generate_request
from galley.client.streams import AsyncStream
from galley.pb.galley.v1 import galley_pb2_grpc as rpc

SLOW, NEVER = "slow", "never"
UNREAD = "ended unread"
_NO_HINT_S = 1.0
_UNREAD_TOKENS = 1024
_SLOW_TOKENS = 128
_LOGPROBS = 20
_UNREAD_PAUSE_S = 10.0
"""A client that never reads stays away so much longer than the gateway's limit: its window fills first."""
# A client may have a transport that buffers almost nothing.
_SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))


@dataclass(frozen=True, slots=True)
class Arrival:
    """Tokens that came at `at_s` (monotonic), `gap_s` after the ones before (None: first of the answer)."""

    at_s: float
    tokens: int
    gap_s: float | None
    counted: bool


@dataclass(frozen=True, slots=True)
class Refusal:
    """A call that was refused at `at_s` (monotonic), `took_s` after it was made."""

    at_s: float
    took_s: float
    retry_after_s: float | None


@dataclass(slots=True)
class Heard:
    """The outcomes of all calls so far."""

    arrivals: list[Arrival] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    ended: dict[str, int] = field(default_factory=dict)
    waits_s: list[float] = field(default_factory=list)
    """Seconds until the first token of each answer."""

    def count(self, what: str) -> None:
        """Count one outcome."""
        self.ended[what] = self.ended.get(what, 0) + 1


class Caller:
    """A client that makes one visit after the other until `stop`; the pace of `counted` ones is judged."""

    def __init__(
        self, client: AsyncClient, mix: Mix, references: References, heard: Heard, *, counted: bool = True
    ) -> None:
        self._client = client
        self._mix = mix
        self._references = references
        self._heard = heard
        self._counted = counted
        self._over = asyncio.Event()
        self._called_s = 0.0
        self._last_s: float | None = None

    def stop(self) -> None:
        """Make no further visit; the one under way goes on to its end."""
        self._over.set()

    async def run(self, after_s: float = 0.0) -> None:
        """Begin after `after_s`. Errors of calls are recorded in `heard`, not raised."""
        await self._pause(after_s)
        while not self._over.is_set():
            visit = self._mix.draw()
            try:
                await self._visit(visit)
            except GalleyRpcError as error:
                await self._turned_away(error)
            else:
                self._heard.count(visit.manner)

    async def _visit(self, visit: Visit) -> None:
        request = visit.request
        stream = self._client.stream(request.prompt, **request.options(visit.speculation))
        until = None if visit.manner is Manner.READ else visit.leave_after
        if await self._read(stream, until):
            self._compare(visit, stream, whole=True)
            return
        if visit.manner is Manner.ABORT:
            await self._client.abort(stream.session_id)
        if visit.manner is Manner.RESUME:
            await asyncio.sleep(visit.away_s)
            stream = self._client.resume_stream(stream)
        whole = visit.manner is Manner.RESUME and await self._read(stream, None)
        self._compare(visit, stream, whole=whole)

    def _compare(self, visit: Visit, stream: AsyncStream, *, whole: bool) -> None:
        if not self._references.agree(visit.request, stream.tokens, whole=whole):
            self._heard.wrong.append(f"{visit.request.name or 'once'}: {stream.session_id}")

    async def _read(self, stream: AsyncStream, until: int | None) -> bool:
        """Read all, or until `until` tokens arrived, and leave; return True if the stream ended."""
        self._called_s, self._last_s = time.monotonic(), None
        try:
            async for event in stream:
                if tokens := len(event.chunk.token_ids):
                    self._note(tokens)
                if until is not None and len(stream.tokens) >= until:
                    break
            return stream.finished is not None
        finally:
            stream.cancel()

    def _note(self, tokens: int) -> None:
        now_s = time.monotonic()
        gap_s = None if self._last_s is None else now_s - self._last_s
        if gap_s is None:
            self._heard.waits_s.append(now_s - self._called_s)
        self._heard.arrivals.append(Arrival(now_s, tokens, gap_s, self._counted))
        self._last_s = now_s

    async def _turned_away(self, error: GalleyRpcError) -> None:
        now_s = time.monotonic()
        if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            self._heard.refusals.append(Refusal(now_s, now_s - self._called_s, error.retry_after_s))
            await self._pause(_NO_HINT_S if error.retry_after_s is None else error.retry_after_s)
        else:
            self._heard.failures.append(str(error))
            await self._pause(_NO_HINT_S)

    async def _pause(self, seconds: float) -> None:
        """Sleep for `seconds`, or until `stop`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._over.wait()


@asynccontextmanager
async def calling(many: Sequence[Caller], spread_s: float, *, cut: bool = False) -> AsyncIterator[None]:
    """Run callers in the context, started over `spread_s`; then wait for their answers, or `cut` them."""
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(caller.run(spread_s * number / len(many))) for number, caller in enumerate(many)
        ]
        try:
            yield
        finally:
            for caller, task in zip(many, tasks, strict=True):
                caller.stop()
                if cut:
                    task.cancel()


class Misreader:
    """A client that reads long answers over a small window, each event `pause_s` after the last.

    Without `pause_s` it reads the first event, then nothing for longer than the gateway waits, then the rest.
    """

    def __init__(self, address: str, client_timeout_s: float, pause_s: float | None, heard: Heard) -> None:
        self._address = address
        self._away_s = client_timeout_s + _UNREAD_PAUSE_S
        self._pause_s = pause_s
        self._heard = heard

    async def run(self) -> None:
        """Call until cancelled."""
        async with grpc.aio.insecure_channel(self._address, options=_SMALL_WINDOW) as channel:
            stub: rpc.GenerationAsyncStub = rpc.GenerationStub(channel)
            while True:
                await self._visit(stub)

    async def _visit(self, stub: rpc.GenerationAsyncStub) -> None:
        slow = self._pause_s is not None
        options = GenerateOptions(
            max_tokens=_SLOW_TOKENS if slow else _UNREAD_TOKENS, ignore_eos=True, logprobs=_LOGPROBS
        )
        stream = AsyncStream(stub.Generate(generate_request([Message("user", "Tell me a story.")], options)))
        kind = SLOW if slow else NEVER
        try:
            await anext(stream)
            await asyncio.sleep(0 if slow else self._away_s)
            async for _ in stream:
                await asyncio.sleep(self._pause_s or 0)
        except GalleyRpcError as error:
            await self._count_failure(kind, error)
        else:
            self._heard.count(f"{kind}: read to the end")
        finally:
            stream.cancel()

    async def _count_failure(self, kind: str, error: GalleyRpcError) -> None:
        if error.code is grpc.StatusCode.UNAVAILABLE and "left unread" in error.message:
            self._heard.count(f"{kind}: {UNREAD}")
            return
        self._heard.failures.append(f"{kind}: {error}")
        await asyncio.sleep(error.retry_after_s or _NO_HINT_S)
