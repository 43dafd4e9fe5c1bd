"""The full stack of processes under streams, and what is done to it: each disturbance is measured and mended.

Two gateways, two targets, two drafts and a Valkey; the streams' clients know both gateways. A disturbance
strikes one process: SIGKILL, SIGTERM (both are followed by a restart), or SIGSTOP and, some time later,
SIGCONT. The next comes once that process is back and every stream has had a token.
"""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any

from services.cli.parts import stack_parts
from services.cli.stack import Facts, Stack, StackOptions
from services.client.client import GalleyClient, Retries
from tests.chaos.streams import Stream, options, prompts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from services.cli.stack import PartSpec, StackDirs

PATIENCE_S = 60.0
SETTLE_S = 1.0
"""Gateways look twice a second who is there."""
KILL, TERM, STOP = "SIGKILL", "SIGTERM", "SIGSTOP"
PARTS = ("gateway", "gateway-2", "target", "target-2", "draft", "draft-2", "valkey")
_FROZEN_S = (0.2, 3.0)


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What is done to which process; one that is stopped goes on after `frozen_s`."""

    part: str
    what: str
    frozen_s: float = 0.0

    @property
    def kind(self) -> str:
        """The same for all processes of a pool."""
        return f"{self.part.removesuffix('-2')} {self.what}"


@dataclass(frozen=True, slots=True)
class Measured:
    """How long after a disturbance the last stream had its next token, and each of them."""

    disturbance: Disturbance
    next_token_s: tuple[float, ...]

    @property
    def worst_s(self) -> float:
        return max(self.next_token_s)


def disturbances(count: int, seed: int, whats: Sequence[str] = (KILL, TERM, STOP)) -> list[Disturbance]:
    """The same for the same seed; each kind as often as any other, in random order."""
    chance = Random(seed)
    kinds = [(part, what) for part in PARTS for what in whats]
    drawn: list[tuple[str, str]] = []
    while len(drawn) < count:
        chance.shuffle(kinds)
        drawn += kinds
    return [Disturbance(part, what, chance.uniform(*_FROZEN_S)) for part, what in drawn[:count]]


class Trial:
    """A stack under streams."""

    def __init__(self, stack: Stack, streams: list[Stream]) -> None:
        self.stack = stack
        self.streams = streams
        self._running: list[asyncio.Task[None]] = []

    async def learn(self) -> None:
        """What each stream must hear, while nothing is disturbed."""
        await asyncio.gather(*(stream.learn() for stream in self.streams))

    def start(self) -> None:
        """Let the streams run."""
        self._running = [asyncio.create_task(stream.run()) for stream in self.streams]

    async def finish(self) -> None:
        """Let each come to its end; raises what went wrong with any."""
        for stream in self.streams:
            stream.over = True
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*self._running)

    async def stop(self) -> None:
        """Whatever is still under way."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def disturb(self, disturbance: Disturbance) -> Measured:
        """Raises what went wrong with a stream, or TimeoutError if one hears nothing any more."""
        struck_s = time.monotonic()
        mending = asyncio.create_task(self._strike(disturbance))
        try:
            waits = await self._unless_one_fails(
                asyncio.gather(*(stream.next_token_s(struck_s, PATIENCE_S) for stream in self.streams))
            )
        finally:
            await mending
        await asyncio.sleep(SETTLE_S)
        return Measured(disturbance, tuple(waits))

    async def _unless_one_fails(self, waiting: asyncio.Future[list[float]]) -> list[float]:
        """A stream that has failed will hear nothing: say why instead of waiting for it."""
        pending: set[asyncio.Future[Any]] = {waiting, *self._running}
        await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in self._running:
            if task.done():
                waiting.cancel()
                task.result()
        return await waiting

    async def _strike(self, disturbance: Disturbance) -> None:
        part, stack = disturbance.part, self.stack
        if disturbance.what == STOP:
            stack.send(part, signal.SIGSTOP)
            await asyncio.sleep(disturbance.frozen_s)
            stack.send(part, signal.SIGCONT)
            return
        if disturbance.what == TERM:
            stack.send(part, signal.SIGTERM)
            await stack.ended(part)
        else:
            await stack.kill(part)
        await stack.restart(part)


@asynccontextmanager
async def trial(model: Path, streams: int, max_tokens: int, seed: int, log_dir: Path) -> AsyncIterator[Trial]:
    """A running stack that serves `model`, and its streams, which have not begun."""
    asked = StackOptions(
        model=str(model),
        draft_model="none",
        dtype="float32",
        gateways=2,
        replicas=2,
        drafts=2,
        log_dir=log_dir,
    )
    async with AsyncExitStack() as opened:
        stack = await opened.enter_async_context(Stack(asked, parts=_parts))
        clients = [
            await opened.enter_async_context(GalleyClient(addresses, retries=Retries(PATIENCE_S, PATIENCE_S)))
            for addresses in (stack.gateways, stack.gateways[::-1])
        ]
        made = [
            Stream(clients[number % 2], prompt, options(max_tokens, number))
            for number, prompt in enumerate(prompts(streams, seed))
        ]
        running = Trial(stack, made)
        opened.push_async_callback(running.stop)
        yield running


def _parts(asked: StackOptions, dirs: StackDirs) -> list[PartSpec]:
    """Gateways come back at their addresses, which clients know."""
    return [_at_home(spec) if spec.name.startswith("gateway") else spec for spec in stack_parts(asked, dirs)]


def _at_home(spec: PartSpec) -> PartSpec:
    def command(facts: Facts) -> list[str]:
        words = list(spec.command(facts))
        if spec.name in facts:  # of its former life
            port = str(facts[spec.name]["address"]).rpartition(":")[2]
            words[words.index("--port") + 1] = port
        return words

    return replace(spec, command=command)
