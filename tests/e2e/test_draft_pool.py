"""The draft pool of a whole stack is killed, frozen and replaced mid-stream: nobody hears another token."""

from __future__ import annotations

import asyncio
import functools
import itertools
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest

from galley.client.client import AsyncClient, TokenStream
from galley.client.options import Message, Speculation
from galley.common.registry.leases import DRAFT_POOL, ReplicaRegistry
from galley.core.routing.choice import DraftLease
from galley.stack.stack import Stack, StackOptions
from tests.fakes.waiting import Watch

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

MAX_TOKENS = 1500
# By how much a drafted answer may be ahead of its plain self, which has to catch up in the end.
LEAD_TOKENS = 50
LIST = ", ".join(f"item {n} costs {7 * n} euros" for n in range(1, 20))
ASKED = (
    (Speculation(k=4), 0.0, f"Repeat this list, changing nothing: {LIST}."),
    (Speculation(k=4), 0.7, "Tell a long story about a lighthouse."),
)


@dataclass
class Listener:
    """Hears one answer after the other, for a quick machine is through with one before the pool is done.

    With a `twin` it reads on only while that is not too far behind. `tokens` are all that it heard;
    `from_draft` says of each whether a draft had proposed it.
    """

    ask: Callable[[int], TokenStream]
    twin: Listener | None = None
    tokens: list[int] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)
    watch: Watch = field(default_factory=Watch)

    async def listen(self) -> None:
        """Ask with one seed after the other until it is cut off."""
        for seed in itertools.count():
            async for event in self.ask(seed):
                self.tokens += event.chunk.token_ids
                self.from_draft += event.chunk.from_draft
                self.watch.changed()
                if self.twin is not None:
                    await self.twin.has_tokens(len(self.tokens) - LEAD_TOKENS)

    async def accepted_since(self, index: int) -> None:
        """Wait for an accepted token at `index` or later."""
        await self.watch.until(lambda: any(self.from_draft[index:]), patience_s=None)

    async def has_tokens(self, count: int) -> None:
        """Wait until it has as many tokens."""
        await self.watch.until(lambda: len(self.tokens) >= count, patience_s=None)


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    """Two drafts, which register; of the trained model, if the installation has it."""
    async with Stack(StackOptions(drafts=2)) as stack:
        yield stack


@pytest.fixture
async def registry(stack: Stack) -> AsyncIterator[ReplicaRegistry]:
    registry = ReplicaRegistry(f"unix://{stack.address('valkey')}")
    yield registry
    await registry.close()


def listeners(client: AsyncClient, *, drafted: bool) -> list[Listener]:
    return [
        Listener(
            functools.partial(ask, client, how if drafted else Speculation(off=True), temperature, prompt)
        )
        for how, temperature, prompt in ASKED
    ]


def ask(client: AsyncClient, how: Speculation, temperature: float, prompt: str, seed: int) -> TokenStream:
    return client.generate(
        [Message("user", prompt)],
        max_tokens=MAX_TOKENS,
        temperature=temperature,
        seed=seed,
        ignore_eos=True,
        speculation=how,
    )


async def test_a_pool_that_is_killed_frozen_and_replaced_costs_its_streams_nothing_but_speed(
    stack: Stack, registry: ReplicaRegistry
) -> None:
    """Their plain selves run beside them, so that the tokens can be compared however many there are."""
    async with AsyncClient(stack.address("gateway")) as client, asyncio.TaskGroup() as group:
        plain = listeners(client, drafted=False)
        drafted = listeners(client, drafted=True)
        for each, twin in zip(drafted, plain, strict=True):
            each.twin = twin
        listening = [group.create_task(each.listen()) for each in (*drafted, *plain)]
        await resumed(drafted)
        await until(registry, sessions_at(stack.address("draft"), 1))
        await until(registry, sessions_at(stack.address("draft-2"), 1))

        await stack.kill("draft")
        await until(registry, sessions_at(stack.address("draft-2"), len(ASKED)))
        await resumed(drafted)

        stack.send("draft-2", signal.SIGSTOP)
        try:
            await stack.restart("draft")
            await until(registry, sessions_at(stack.address("draft"), len(ASKED)))
            await resumed(drafted)
            heard = [list(each.tokens) for each in drafted]
            for each, tokens in zip(plain, heard, strict=True):
                await each.has_tokens(len(tokens))
        finally:
            await stack.kill("draft-2")
        for task in listening:
            task.cancel()
    for each, tokens in zip(plain, heard, strict=True):
        assert each.tokens[: len(tokens)] == tokens
        assert not any(each.from_draft)


async def resumed(heard: list[Listener]) -> None:
    """Wait until each hears of an accepted token that it has not heard yet."""
    await asyncio.gather(*(each.accepted_since(len(each.from_draft)) for each in heard))


def sessions_at(address: str, count: int) -> Callable[[list[DraftLease]], bool]:
    """Whether so many sessions ask this one, by what its lease says."""
    return lambda leases: any(it.address == address and it.sessions >= count for it in leases)


async def until(registry: ReplicaRegistry, holds: Callable[[list[DraftLease]], bool]) -> None:
    """Wait until the registry reads so."""
    while not holds(await registry.read(DRAFT_POOL)):  # noqa: ASYNC110  # Redis does not call back
        await asyncio.sleep(0.02)
