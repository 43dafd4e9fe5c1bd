"""Measure this tree beside an earlier revision: speed, CPU time a token and start-up, in alternating blocks.

The revision is exported into a folder of its own. Each life runs `galley up` of both trees, one after the
other (start-up is timed alone, with compiled kernels on disk), then sends prompts to both in turn. A caller
uses only what the wire has had since version 1, so any revision with a `galley up` can be the base.
"""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.harness import BENCH, Goal, at_least, at_most
from bench.loops.options import Options
from bench.loops.run import Run, Scenario, of_arm
from bench.loops.sides import Cpu, stop
from galley.bench.closed_loop import AUTO, OFF, GatewayLoop, LoopSide
from galley.bench.summary import Interval, median_interval, ratio_interval, speed_ratio
from galley.client.client import AsyncClient
from galley.stack import guard
from galley.stack.ports import free_ports

BASE, THIS = "base", "this"
SPECULATIONS = (OFF, AUTO)
LEAST_SPEED, MOST_CPU, MOST_START = 0.98, 1.02, 1.0
_START_S = 300.0
_RECONNECT = (("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 50))


def arm_of(tree: str, speculation: str) -> str:
    """Return the arm's name, as `this:auto`."""
    return f"{tree}:{speculation}"


def tag_of(arm: str) -> str:
    """Return the tag of an arm's prompts: both trees answer the same ones, neither answers one twice."""
    return "." + arm.partition(":")[2]


@asynccontextmanager
async def start(run: Run) -> AsyncIterator[Mapping[str, LoopSide]]:
    """Start both trees, the first one alternating with the life."""
    trees = {BASE: _export(run.options.base), THIS: BENCH.parent}
    if not run.life:
        for tree, folder in trees.items():  # compiles the kernels, which is not what is compared
            async with _up(run, f"{tree}-cold", folder):
                run.report(f"{tree} has started once")
    sides: dict[str, LoopSide] = {}
    async with AsyncExitStack() as held:
        for tree in (BASE, THIS) if run.life % 2 else (THIS, BASE):
            process, address, took_s = await held.enter_async_context(_up(run, tree, trees[tree]))
            run.facts.setdefault(f"start_{tree}_s", []).append(round(took_s, 3))
            client = await held.enter_async_context(AsyncClient(address))
            cpu = Cpu([process.pid], children=True)
            for speculation in SPECULATIONS:
                sides[arm_of(tree, speculation)] = GatewayLoop(client, cpu.seconds, speculation)
        yield sides


def _export(revision: str) -> Path:
    """Write the files of a revision to a folder of its own, which keeps its compiled kernels valid."""
    sha = subprocess.run(
        ("git", "rev-parse", revision), cwd=BENCH.parent, check=True, capture_output=True, text=True
    ).stdout.strip()
    folder = BENCH / ".base" / sha
    if not (folder / "pyproject.toml").exists():
        tops = [top for top in ("galley", "services", "pyproject.toml") if _has(revision, top)]
        command = ("git", "archive", sha, *tops)
        archive = subprocess.run(command, cwd=BENCH.parent, check=True, capture_output=True)
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
    return folder


def _has(revision: str, path: str) -> bool:
    command = ("git", "cat-file", "-e", f"{revision}:{path}")
    return subprocess.run(command, cwd=BENCH.parent, check=False, capture_output=True).returncode == 0


@asynccontextmanager
async def _up(
    run: Run, tree: str, folder: Path
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str, float]]:
    """Run a tree's `galley up`; yield its process, its address and the seconds until it served."""
    [port] = free_ports(1)
    address = f"127.0.0.1:{port}"
    cli = "galley.cli" if (folder / "galley" / "cli").is_dir() else "services.cli"
    # The endpoint file lies in the runtime folder: one for each, so that neither tree sees the other's.
    runtime = run.folder / f"run-{tree}-{run.life}"
    runtime.mkdir(mode=0o700)
    environment = {**os.environ, "PYTHONPATH": str(folder), "XDG_RUNTIME_DIR": str(runtime)}
    options = run.options
    source = folder / "galley" / "cli" / "up.py"
    # Older trees call it --port.
    port_flag = "--grpc-port" if source.exists() and "grpc_port" in source.read_text() else "--port"
    flags = [port_flag, str(port), "--threads", str(options.threads), "--dtype", options.dtype]
    # However the benchmark ends, the stack ends with it.
    guarded = (sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), "0")
    with (run.folder / f"{tree}-{run.life}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(*guarded, sys.executable, "-P", "-m", cli, "up", "--model", str(run.model_dir), *flags),
            env=environment,
            cwd=runtime,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            yield process, address, await _seconds_until_serving(process, address)
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGINT)
            await stop(process)


async def _seconds_until_serving(process: asyncio.subprocess.Process, address: str) -> float:
    """Return the seconds until the gateway serves; raises TimeoutError, RuntimeError if it ends."""
    began_s = time.perf_counter()
    async with asyncio.timeout(_START_S), grpc.aio.insecure_channel(address, options=_RECONNECT) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        serving = health_pb2.HealthCheckResponse.SERVING
        while True:
            check = health.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=1.0)
            try:
                if (await check).status == serving:
                    return time.perf_counter() - began_s
            except grpc.aio.AioRpcError:
                if process.returncode is not None:
                    raise RuntimeError(f"galley up ended with status {process.returncode}") from None


def cpu_ratio(run: Run, speculation: str, streams: int) -> Interval:
    """Return the median of the pairs' ratios of CPU seconds a token, this tree over the base."""
    mine, base = (
        [block.cpu_per_token for block in of_arm(run.blocks, arm_of(tree, speculation), streams)]
        for tree in (THIS, BASE)
    )
    return ratio_interval(mine, base)


def goals(run: Run) -> list[Goal]:
    """Bound speed, CPU a token and start-up against the base."""
    found = []
    revision = run.options.base
    for speculation in SPECULATIONS:
        for streams in run.options.streams:
            for temperature in run.options.temperatures:
                of = (streams, temperature)
                mine, base = (of_arm(run.blocks, arm_of(tree, speculation), *of) for tree in (THIS, BASE))
                ratio = speed_ratio(mine, base)
                if ratio is not None:
                    what = (
                        f"tokens/s, {speculation}, {streams} streams at {temperature:g}, against {revision}"
                    )
                    found.append(at_least("speed", what, ratio, LEAST_SPEED, "x"))
            what = f"CPU a token, {speculation}, {streams} streams, against {revision}"
            found.append(at_most("cpu", what, cpu_ratio(run, speculation, streams), MOST_CPU, "x"))
    starts = zip(run.facts[f"start_{THIS}_s"], run.facts[f"start_{BASE}_s"], strict=True)
    took = median_interval([this / base for this, base in starts])
    found.append(at_most("start", f"start-up, against {revision}", took, MOST_START, "x"))
    return found


def _check(options: Options) -> str:
    if not options.base:
        return "--base: required; name the revision to compare with (make bench-loops BASE=REVISION)"
    command = ("git", "rev-parse", "--verify", "--quiet", f"{options.base}^{{commit}}")
    known = subprocess.run(command, cwd=BENCH.parent, check=False, capture_output=True).returncode == 0
    return "" if known else f"--base: must be a revision of this repository, got {options.base!r}"


ARMS = tuple(arm_of(tree, speculation) for speculation in SPECULATIONS for tree in (BASE, THIS))
LOOPS = Scenario(
    "base",
    "this tree beside an earlier revision: speed, CPU a token, start-up",
    Options(ARMS, streams=(1, 16), lives=7, pairs=1),
    arm_of(BASE, OFF),
    start,
    goals,
    tag_of=tag_of,
    required=frozenset(ARMS),
    check=_check,
)
