"""Measure what audits cost at 16 streams, without speculation: the fastest way there, with the least noise.

One stack, whose gateway draws all finished sessions for audit, a thousand times the default.

- Load: arm `on` sends requests as usual, arm `off` opts out of audits (`no_audit`). After a block of `on` its
  sessions are deleted from the store, so that no audit of them is left for the next block.
- Pauses: bursts of 16 requests with pauses, while finished sessions wait for their audit all the time. A
  block of `on` lasts from the end of an audit to the end of the next one, so it has one audit and one rest of
  the target. A block of `off` has the same bursts, while the turn to audit is held by the benchmark.
- Met: bursts that begin while the target computes for an audit, and the same bursts without.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from redis.asyncio import Redis

from bench.harness import Goal, at_least, at_most
from bench.living.costs.blocks import (
    STREAMS,
    Comparison,
    Figures,
    Meter,
    compare,
    differing,
    figures_of,
    load_of,
    new_prompts,
    next_prompts,
    open_loops,
    report,
    run_block,
    temperature_of,
)
from bench.loops.sides import write_keys
from galley.bench.closed_loop import OFF as NO_SPECULATION
from galley.bench.closed_loop import WARM_UP, GatewayLoop, LoopBlock
from galley.bench.workloads import Prompt
from galley.common.registry.leases import DEFAULT_POOL
from galley.stack.options import StackOptions
from galley.stack.stack import Stack
from galley.top.scrape import scrape

ON, OFF = "on", "off"
MOST_LOST, MOST_SHARE = 0.01, 0.01
TEMPERATURES = (0.0, 0.7)
_TURNS = 2
_BURST_TOKENS = 24
_WAITING = 40
"""Sessions that wait for their audit in parts with pauses."""
_SHORT_TOKENS = 8
"""Tokens of such a session. The target rests 99 times as long as an audit takes, so short ones make many."""
_PAUSE_S = (0.1, 1.0)
_LOOK_S = 0.01
_TIMEOUT_S = 60.0
_HELD_MS = 3_600_000
_COMPUTING_MS = 120_000
"""A turn that ends so late is in use: gateways hold one for 150 s at first, and rest for less."""


class Audits:
    """The audits of a stack's gateway, by its metrics and the keys that it keeps in Redis."""

    def __init__(self, stack: Stack) -> None:
        self._metrics = next(service.metrics for service in stack.services if service.name == "gateway")
        self._redis: Redis = Redis.from_url(stack.store_url)
        self._totals = f"galley:audit:{{{DEFAULT_POOL}}}"
        self._turn = f"{self._totals}:turn:{stack.address('target')}"

    async def compute_s(self) -> float:
        """Return the computing time of the audits that have ended."""
        return await self._sample("galley_audit_seconds_total")

    async def tokens(self) -> int:
        return int(await self._sample("galley_audit_tokens_total"))

    async def count(self) -> int:
        """Return the number of audits that have ended."""
        return int(await self._redis.hget(self._totals, "sessions") or 0)

    async def clear(self) -> None:
        """Have no session wait for its audit."""
        async with asyncio.timeout(_TIMEOUT_S):
            while await self._sample("galley_audit_waiting"):
                if keys := [key async for key in self._redis.scan_iter("galley:sessions:*")]:
                    await self._redis.delete(*keys)
                await self.release()
                await asyncio.sleep(0.1)

    async def hold(self) -> None:
        """Have no audit begin until the turn is released."""
        await self._redis.set(self._turn, "", px=_HELD_MS)

    async def release(self) -> None:
        """Allow an audit now, whatever rest the target is owed."""
        await self._redis.delete(self._turn)

    async def is_computing(self) -> bool:
        return _COMPUTING_MS < await self._redis.pttl(self._turn) < _HELD_MS // 2

    async def end_after(self, count: int) -> float:
        """Wait until more than `count` audits have ended; return when, by the monotonic clock."""
        async with asyncio.timeout(_TIMEOUT_S):
            while await self.count() <= count:  # noqa: ASYNC110  # another process counts
                await asyncio.sleep(_LOOK_S)
        return time.monotonic()

    async def close(self) -> None:
        await self._redis.aclose()

    async def _sample(self, name: str) -> float:
        return sum((await scrape(self._metrics)).get(name, {}).values())


@dataclass(frozen=True, slots=True)
class Share:
    """The computing time of one audit, and the time from its end until the end of the next one."""

    compute_s: float
    of_s: float


@dataclass(frozen=True, slots=True)
class AuditCosts:
    """`audited` has the number of audits and of compared tokens after each part."""

    load: Sequence[Figures]
    pauses: Sequence[Figures]
    met: Sequence[Figures]
    shares: Sequence[Share]
    audited: Mapping[str, tuple[int, int]]
    differing_answers: int

    def compared(self) -> dict[str, Comparison]:
        by_temperature = {
            f"load, T = {temperature:g}": [one for one in self.load if one.temperature == temperature]
            for temperature in TEMPERATURES
        }
        parts = {**by_temperature, "pauses": self.pauses, "met": self.met}
        return {name: compare(of, ON, OFF) for name, of in parts.items()}

    @property
    def share(self) -> float:
        """Return the share of the target's time that audits took while sessions waited for one."""
        return sum(one.compute_s for one in self.shares) / sum(one.of_s for one in self.shares)

    def goals(self) -> list[Goal]:
        goals = []
        for name, of in self.compared().items():
            if name == "met":
                continue
            speed = at_least("audit", f"tokens/s, {name}", of.speed, 1 - MOST_LOST, "x", digits=4)
            goals.append(speed)
            if name != "pauses":
                goals.append(at_most("audit", f"CPU a token, {name}", of.cpu, 1 + MOST_LOST, "x", digits=4))
        share = Goal(
            "audit",
            "share of the target's time, pauses",
            f"{self.share:.4f}",
            f"<= {MOST_SHARE:g}",
            self.share <= MOST_SHARE,
        )
        return [*goals, share]


@asynccontextmanager
async def audited_stack(folder: Path) -> AsyncIterator[tuple[Stack, dict[str, str]]]:
    """Start a stack that audits all its sessions; yield it and the key of each arm."""
    file = folder / "audit-keys.toml"
    keys = write_keys(file, (ON, OFF))
    arguments = ["--api-keys-file", str(file), "--audit-ratio", "1"]
    options = StackOptions(metrics=True, draft_model="none", extra_args={"gateway": arguments})
    async with Stack(options) as stack:
        yield stack, keys


async def measure_audits(folder: Path, pairs: int, max_tokens: int) -> AuditCosts:
    async with (
        audited_stack(folder) as (stack, keys),
        open_loops(stack, keys, NO_SPECULATION) as drawn,
        open_loops(stack, keys, NO_SPECULATION, no_audit=True) as left_out,
    ):
        bench = _Bench(stack, Audits(stack), drawn, left_out)
        load = await bench.load(pairs, max_tokens)
        pauses, shares = await bench.pauses(pairs)
        met = await bench.met(pairs, max_tokens)
        await bench.audits.close()
    return AuditCosts(load, pauses, met, shares, bench.audited, differing(bench.blocks))


@dataclass(slots=True)
class _Bench:
    """The parts of the measurement, and all their answers.

    Sessions of the loops `drawn` wait for their audit when they have finished, those of `left_out` do not.
    """

    stack: Stack
    audits: Audits
    drawn: Mapping[str, GatewayLoop]
    left_out: Mapping[str, GatewayLoop]
    audited: dict[str, tuple[int, int]] = field(default_factory=dict)
    blocks: list[LoopBlock] = field(default_factory=list)

    async def load(self, pairs: int, max_tokens: int) -> list[Figures]:
        """Run closed loops: no audit has a chance but at the begin and the end of a block."""
        prompts, found = new_prompts("load"), []
        for pair in range(WARM_UP, pairs):
            for temperature in TEMPERATURES:
                chosen = next_prompts(prompts, STREAMS * _TURNS)
                for arm in (ON, OFF) if pair % 2 else (OFF, ON):
                    load = load_of(pair, arm, temperature, chosen, max_tokens)
                    loop = (self.drawn if arm == ON else self.left_out)[arm]
                    block, figures = await run_block(self.stack, loop, load)
                    await self.audits.clear()
                    if pair != WARM_UP:
                        self.blocks.append(block)
                        found.append(figures)
                        report("audit, load", figures)
        await self._note("load")
        return found

    async def pauses(self, pairs: int) -> tuple[list[Figures], list[Share]]:
        """Run bursts with pauses, in which audits run."""
        prompts, found, shares = new_prompts("pauses"), [], []
        drawn_s = random.Random("pauses")
        await self._have_waiting(_short_prompts(), _WAITING, _SHORT_TOKENS)
        for arm in (ON, OFF):  # opens the callers' connections
            await self._run(WARM_UP, arm, next_prompts(prompts, STREAMS), _BURST_TOKENS)
        for pair in range(pairs):
            before_s, count = await self.audits.compute_s(), await self.audits.count()
            await self.audits.release()
            began_s = await self.audits.end_after(count)
            compute_s, count = await self.audits.compute_s() - before_s, await self.audits.count()
            used: list[_Burst] = []
            meter, blocks, ended_s = Meter(self.stack), list[LoopBlock](), None
            while ended_s is None:
                used.append(_Burst(next_prompts(prompts, STREAMS), drawn_s.uniform(*_PAUSE_S)))
                blocks.append(await self._run(pair, ON, used[-1].prompts, _BURST_TOKENS))
                ended_s = await self._pause(used[-1].pause_s, count)
            found.append(figures_of(blocks, meter.spent()))
            await self.audits.hold()
            shares.append(Share(compute_s, ended_s - began_s))
            count = await self.audits.count()
            meter, blocks = Meter(self.stack), []
            for burst in used:
                blocks.append(await self._run(pair, OFF, burst.prompts, _BURST_TOKENS))
                await self._pause(burst.pause_s, count)
            found.append(figures_of(blocks, meter.spent()))
            report("audit, pauses", *found[-2:])
        await self._note("pauses")
        await self.audits.clear()
        return found, shares

    async def _pause(self, pause_s: float, count: int) -> float | None:
        """Wait, but only until more than `count` audits have ended; return when, or None if none has."""
        until_s = time.monotonic() + pause_s
        while time.monotonic() < until_s:
            if await self.audits.count() > count:
                return time.monotonic()
            await asyncio.sleep(_LOOK_S)
        return None

    async def met(self, pairs: int, max_tokens: int) -> list[Figures]:
        """Run bursts that begin while the target computes for an audit."""
        prompts, found = new_prompts("met"), []
        await self._have_waiting(new_prompts("waiting"), 2 * STREAMS, max_tokens)
        for pair in range(pairs):
            chosen = next_prompts(prompts, STREAMS)
            await self.audits.release()
            async with asyncio.timeout(_TIMEOUT_S):
                while not await self.audits.is_computing():  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_S / 2)
            for arm in (ON, OFF):
                meter = Meter(self.stack)
                block = await self._run(pair, arm, chosen, _BURST_TOKENS)
                found.append(figures_of([block], meter.spent()))
            report("audit, met", *found[-2:])
        await self._note("met")
        return found

    async def _have_waiting(self, prompts: Iterator[Prompt], number: int, max_tokens: int) -> None:
        await self.audits.hold()
        load = load_of(0, NO_SPECULATION, 0.0, next_prompts(prompts, number), max_tokens)
        await self.drawn[OFF].run(load)

    async def _run(self, pair: int, arm: str, prompts: Sequence[Prompt], max_tokens: int) -> LoopBlock:
        load = load_of(pair, arm, temperature_of(pair), prompts, max_tokens)
        block = await self.left_out[arm].run(load)
        self.blocks.append(block)
        return block

    async def _note(self, part: str) -> None:
        self.audited[part] = await self.audits.count(), await self.audits.tokens()


@dataclass(frozen=True, slots=True)
class _Burst:
    prompts: Sequence[Prompt]
    pause_s: float


def _short_prompts() -> Iterator[Prompt]:
    return (Prompt(f"short-{number}", f"{number}. Name a colour.") for number in itertools.count())
