"""Measure the speed with 20 ms (--delay-ms) each way before target and draft.

Gateways reach target and draft through relays (tests/fakes/relay.py): of 0 ms (`near`), of 20 ms (`far`), and
of 20 ms before the session store as well (`far-store`). --mbit-s limits the far ones. Speculation is off,
fixed at k = 4, or auto. By default there is one stream at temperature 0.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from bench.harness import Goal, at_least
from bench.loops.options import Options
from bench.loops.run import Run, Scenario, of_arm
from bench.loops.sides import Cpu
from galley.bench.closed_loop import AUTO, OFF, GatewayLoop, LoopSide
from galley.bench.summary import speed_ratio
from galley.client.client import AsyncClient
from galley.stack.part import PartSpec
from galley.stack.parts import python_module
from galley.stack.stack import Stack, StackOptions
from tests.fakes.link import Link
from tests.fakes.relay import Relay

NEAR, FAR, FAR_STORE = "near", "far", "far-store"
PLACES = (NEAR, FAR, FAR_STORE)
SPECULATIONS = (OFF, "hybrid-4", AUTO)
BOUND = 0.8
_SHARED_PARTS = ("valkey", "target", "draft")


def arm_of(place: str, speculation: str) -> str:
    """Return the arm's name, as `far:auto`."""
    return f"{place}:{speculation}"


@asynccontextmanager
async def start(run: Run) -> AsyncIterator[Mapping[str, LoopSide]]:
    """Start a stack, and a gateway with its relays for each place."""
    options = run.options
    given = StackOptions(
        model=options.model,
        draft_model=options.draft_model or None,
        dtype=options.dtype,
        threads=options.threads,
    )
    async with AsyncExitStack() as held:
        stack = await held.enter_async_context(Stack(given))

        async def behind(part: str, delay_s: float) -> str:
            bits_per_s = 1e6 * options.mbit_s if delay_s and options.mbit_s else math.inf
            link = Link(delay_s, bits_per_s=bits_per_s)
            return (await held.enter_async_context(Relay(stack.address(part), link))).address

        specs = []
        for place in PLACES:
            delay_s = 0.0 if place == NEAR else options.delay_ms / 1000
            store = f"unix://{stack.address('valkey')}"
            if place == FAR_STORE:
                store = f"redis://{await behind('valkey', delay_s)}"
            command = python_module(
                "services.gateway",
                *("--model", str(run.model_dir), "--redis-url", store),
                *("--target", await behind("target", delay_s), "--draft", await behind("draft", delay_s)),
            )
            specs.append(PartSpec(place, lambda _, command=command: command))  # type: ignore[misc]
        gateways = await held.enter_async_context(
            Stack(StackOptions(threads=options.threads), parts=lambda _options, _dirs: specs)
        )
        sides: dict[str, LoopSide] = {}
        for place in PLACES:
            client = await held.enter_async_context(AsyncClient(gateways.address(place)))
            cpu = Cpu([gateways.pid(place), *(stack.pid(part) for part in _SHARED_PARTS)])
            for speculation in SPECULATIONS:
                sides[arm_of(place, speculation)] = GatewayLoop(client, cpu.seconds, speculation)
        yield sides


def goals(run: Run) -> list[Goal]:
    """Compare far with near for each way to speculate."""
    found = []
    for speculation in SPECULATIONS[1:]:
        far, near = (of_arm(run.blocks, arm_of(place, speculation)) for place in (FAR, NEAR))
        ratio = speed_ratio(far, near)
        if ratio is not None:
            what = f"tokens/s of {speculation} with {run.options.delay_ms:g} ms each way against 0 ms"
            found.append(at_least("slow-links", what, ratio, BOUND, "x"))
    return found


# Near and far of one kind of speculation are neighbours, so that what is compared lies seconds apart.
ARMS = tuple(arm_of(place, speculation) for speculation in SPECULATIONS for place in PLACES)
SLOW_LINKS = Scenario(
    "slow-links",
    "speculation with 20 ms each way before target and draft",
    Options(ARMS, streams=(1,), temperatures=(0.0,), max_tokens=96),
    arm_of(NEAR, OFF),
    start,
    goals,
    primed_by=arm_of(NEAR, OFF),
    required=frozenset(ARMS),
)
