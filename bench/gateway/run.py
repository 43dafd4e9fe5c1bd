"""The cells of the gateway benchmark, by part. Each part starts its processes anew."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.gateway.load import LOAD, MEASURED, Load, Measured
from bench.gateway.parts import TRACED, Cluster
from bench.gateway.profile import Profile, record_profile
from galley.stack.stack import Stack

ONE, SIX = "one token a verdict", "six tokens a verdict"
_DRAFTED = {ONE: 0, SIX: 5}
PACED, SATURATED, OVERLOAD, TELEMETRY, GATEWAYS = "paced", "saturated", "overload", "telemetry", "gateways"
PARTS = (PACED, SATURATED, OVERLOAD, TELEMETRY, GATEWAYS)
_SHARED_STREAMS, _SHARED_GATEWAYS = 400, (1, 2, 4, 8)
_TELEMETRY_STREAMS = 100
_OVERLOAD, _OVERLOAD_TOKENS, _OVERLOAD_WINDOWS, _BUSY_STREAMS = 1.5, 64, 3.0, 60
OVERLOAD_SLOTS = (64, 2000)
# So many streams get each their next credit at another time only in a longer window.
_MANY, _MANY_WINDOWS = 1000, 2.0
# A saturated gateway refuses streams; after this time those that have started are measured.
_SATURATED_START_S = 15.0


@dataclass(frozen=True, slots=True)
class Options:
    """`rate` is the verdicts a second of one token of the paced parts, `drafted_rate` those of six."""

    parts: tuple[str, ...] = PARTS
    streams: tuple[int, ...] = (10, 100, 500, 1000, 2000)
    verdicts: tuple[str, ...] = (ONE, SIX)
    rate: float = 2000.0
    drafted_rate: float = 1000.0
    blocks: int = 3
    pairs: int = 7
    window_s: float = 5.0
    profile: bool = True


@dataclass(frozen=True, slots=True)
class Cell:
    """One measured block. `arm` is what differs within its part, such as "traced" or "4 gateways"."""

    part: str
    verdict: str
    streams: int
    arm: str
    measured: Measured


class Bench:
    """Runs parts, and keeps their cells and profiles."""

    def __init__(self, options: Options, model_dir: Path, report: Callable[[Cell], None]) -> None:
        self.options = options
        self.cells: list[Cell] = []
        self.profiles: dict[str, Profile] = {}
        self._model_dir = model_dir
        self._report = report

    async def run(self) -> None:
        """Run the parts of the options, in order. Raise PartFailed or RuntimeError if a process fails."""
        runs = {
            PACED: self._paced,
            SATURATED: self._saturated,
            OVERLOAD: self._overload,
            TELEMETRY: self._telemetry,
            GATEWAYS: self._gateways,
        }
        for part in self.options.parts:
            await runs[part]()

    async def _paced(self) -> None:
        """Measure the CPU of a token at a rate that the gateway carries easily."""
        rates = {ONE: self.options.rate, SIX: self.options.drafted_rate}
        for verdict in self.options.verdicts:
            async with Cluster(self._model_dir, rates[verdict]).stack() as stack:
                for _ in range(self.options.blocks):
                    for streams in self.options.streams:
                        await self._cell(PACED, verdict, stack, self._load(streams, verdict))
                await self._profile(f"{PACED}, {verdict}", stack, verdict)

    async def _saturated(self) -> None:
        """Measure what one gateway carries: its targets answer at once, and it refuses streams beyond."""
        async with Cluster(self._model_dir).stack() as stack:
            for verdict in self.options.verdicts:
                for streams in self.options.streams:
                    load = replace(self._load(streams, verdict), partly=True, start_s=_SATURATED_START_S)
                    await self._cell(SATURATED, verdict, stack, load)
            await self._profile(f"{SATURATED}, {ONE}", stack, ONE)

    async def _overload(self) -> None:
        """Let answers of 64 tokens begin 1.5 times as often as a gateway, kept busy by the same, ends them.

        The gateway has few slots, or so many that it cannot serve them all.
        """
        for slots in OVERLOAD_SLOTS:
            async with Cluster(self._model_dir, max_sessions=slots).stack() as stack:
                short = replace(self._load(_BUSY_STREAMS, ONE), answer_tokens=_OVERLOAD_TOKENS)
                carried = await self._cell(OVERLOAD, ONE, stack, short, f"carried, {slots} slots")
                arrivals = _OVERLOAD * carried.ended / carried.seconds
                window_s = _OVERLOAD_WINDOWS * short.window_s
                load = replace(short, streams=0, arrivals_per_s=arrivals, warm_s=3.0, window_s=window_s)
                await self._cell(OVERLOAD, ONE, stack, load, overload_arm(slots))

    async def _telemetry(self) -> None:
        """Measure two gateways of one cluster in turn: without telemetry, and with all of it."""
        async with Cluster(self._model_dir, self.options.rate, traced=True).stack() as stack:
            for pair in range(self.options.pairs):
                arms = {"plain": "gateway", "traced": TRACED}
                for arm in sorted(arms, reverse=bool(pair % 2)):
                    load = self._load(_TELEMETRY_STREAMS, ONE)
                    await self._cell(TELEMETRY, ONE, stack, load, arm, (arms[arm],))

    async def _gateways(self) -> None:
        """Measure the CPU of a token over all of 1, 2, 4 and 8 gateways that share one load."""
        cluster = Cluster(self._model_dir, self.options.rate, gateways=max(_SHARED_GATEWAYS))
        async with cluster.stack() as stack:
            for _ in range(self.options.blocks):
                for count in _SHARED_GATEWAYS:
                    load = self._load(_SHARED_STREAMS, ONE)
                    await self._cell(GATEWAYS, ONE, stack, load, f"{count}", cluster.names[:count])

    def _load(self, streams: int, verdict: str) -> Load:
        factor = _MANY_WINDOWS if streams >= _MANY else 1.0
        return Load(
            (), (), streams=streams, drafted=_DRAFTED[verdict], window_s=factor * self.options.window_s
        )

    async def _cell(
        self,
        part: str,
        verdict: str,
        stack: Stack,
        load: Load,
        arm: str = "",
        gateways: Sequence[str] = ("gateway",),
    ) -> Measured:
        measured = await measure(_at(load, stack, gateways))
        self.cells.append(Cell(part, verdict, load.streams, arm, measured))
        self._report(self.cells[-1])
        return measured

    async def _profile(self, name: str, stack: Stack, verdict: str) -> None:
        if self.options.profile:
            streams = min(self.options.streams, key=lambda count: abs(count - 100))
            load = _at(self._load(streams, verdict), stack, ("gateway",))
            self.profiles[name] = await record_profile(stack.pid("gateway"), load.window_s, measure(load))


def _at(load: Load, stack: Stack, gateways: Sequence[str]) -> Load:
    addresses = tuple(stack.address(name) for name in gateways)
    pids = tuple(stack.pid(name) for name in gateways)
    return replace(load, gateways=addresses, pids=pids, store=(stack.pid("valkey"),))


async def measure(load: Load) -> Measured:
    """Run a process of clients. Raise RuntimeError if it fails."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "bench.gateway.clients", LOAD.dump_json(load).decode()),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise RuntimeError(f"the clients failed: {errors.decode(errors='replace')[-2000:]}")
    return MEASURED.validate_json(out.splitlines()[-1])


def overload_arm(slots: int) -> str:
    return f"1.5 times, {slots} slots"


def cells_of(
    cells: Sequence[Cell], part: str, verdict: str = ONE, arm: str = ""
) -> dict[int, list[Measured]]:
    """Return the blocks of a part by their number of streams."""
    found: dict[int, list[Measured]] = {}
    for cell in cells:
        if (cell.part, cell.verdict, cell.arm) == (part, verdict, arm):
            found.setdefault(cell.streams, []).append(cell.measured)
    return found


def worst(values: Sequence[float]) -> float:
    """Return the largest of the values, or NaN if there are none."""
    return max(values, default=math.nan)
