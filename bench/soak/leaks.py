"""Check that everything is released once calls have ended, from what the services export anyway.

- The store holds no key of a session, once their time to live is over.
- The target (GetTargetInfo) has every block free and no request waiting; the draft (lease) has none waiting.
- The gateway admits as many new streams at once as its `max_sessions`.
- Each process has about as many descriptors and threads as when it had first served a whole load.
- The log of each service holds no error, and says at its end how many tasks outlived it.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from galley.client.client import AsyncClient, GalleyRpcError
from galley.common.registry.leases import DRAFT_POOL, ReplicaRegistry
from galley.stack.stack import Stack

if TYPE_CHECKING:
    from bench.soak.memory import Held, Sample, Watcher

_PATIENCE_S = 60.0
_PERIOD_S = 0.5
SERVICES = ("gateway", "draft", "target")
_LOUD = frozenset({"error", "critical"})


@dataclass(frozen=True, slots=True)
class Left:
    """State that was left `gone_s` after the last call: when nothing was left, or the wait was over."""

    gone_s: float
    session_keys: int
    blocks_held: int
    waiting: int
    places: int
    max_sessions: int
    more_descriptors: Mapping[str, int]
    more_threads: Mapping[str, int]
    drained_s: float = 0.0
    tasks: Mapping[str, int | None] | None = None
    errors: tuple[str, ...] = ()
    errors_of_grpc: int = 0


async def left_idle(
    watcher: Watcher, client: AsyncClient, store: str, idle: Mapping[str, Held], ttl_s: float
) -> Left:
    """Return what is left while the stack runs, after waiting for leases and keys to expire."""
    max_sessions = (await client.model_info()).max_sessions
    places = await admitted(client, max_sessions)
    began_s = time.monotonic()
    sample = await _until_gone(watcher, began_s + ttl_s + _PATIENCE_S)
    return Left(
        gone_s=time.monotonic() - began_s,
        session_keys=sample.session_keys,
        blocks_held=sample.blocks_total - sample.blocks_free,
        waiting=sample.queue_depth + await _drafts_waiting(store),
        places=places,
        max_sessions=max_sessions,
        more_descriptors={
            name: now.descriptors - idle[name].descriptors for name, now in sample.processes.items()
        },
        more_threads={name: now.threads - idle[name].threads for name, now in sample.processes.items()},
    )


async def _until_gone(watcher: Watcher, until_s: float) -> Sample:
    while True:
        sample = await watcher.look()
        gone = not sample.session_keys and sample.blocks_free == sample.blocks_total
        if (gone and not sample.queue_depth) or time.monotonic() > until_s:
            return sample
        await asyncio.sleep(_PERIOD_S)


async def _drafts_waiting(store: str) -> int:
    registry = ReplicaRegistry(store)
    try:
        return sum(lease.queue_depth for lease in await registry.read(DRAFT_POOL))
    finally:
        await registry.close()


async def admitted(client: AsyncClient, count: int) -> int:
    """Open `count` streams at once; return how many were admitted, and cancel them."""
    prompt = "Count as far as you can."
    streams = [client.stream(prompt, max_tokens=1024, ignore_eos=True) for _ in range(count)]
    try:
        began = await asyncio.gather(*(anext(stream) for stream in streams), return_exceptions=True)
    finally:
        for stream in streams:
            stream.cancel()
    for outcome in began:
        if isinstance(outcome, BaseException) and not isinstance(outcome, GalleyRpcError):
            raise outcome
    return sum(not isinstance(outcome, BaseException) for outcome in began)


async def stop_services(stack: Stack) -> float:
    """End gateway, draft and target gracefully; return the seconds that it took."""
    began_s = time.monotonic()
    for part in SERVICES:
        stack.send(part, signal.SIGTERM)
        await stack.ended(part)
    return time.monotonic() - began_s


def tasks_left(log: Path) -> int | None:
    """Return the number of tasks that a service logged at its end; None if it logged none."""
    counts = [line["tasks"] for line in _lines(log) if line.get("event") == "server stopped"]
    return int(counts[-1]) if counts else None


def errors_in(log: Path) -> list[str]:
    """Return what a service logged as errors, and asyncio's messages about lost tasks."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    strange = [line for line in lines if "Task was destroyed" in line or "never retrieved" in line]
    loud = [line for line in _lines(log) if line.get("level") in _LOUD and not _of_grpc(line)]
    return strange + [str(line["event"]) for line in loud]


def errors_of_grpc(log: Path) -> int:
    """Count gRPC's own errors; it logs one for a client that leaves while an event is written."""
    return sum(line.get("level") in _LOUD and _of_grpc(line) for line in _lines(log))


def _of_grpc(line: dict[str, Any]) -> bool:
    return str(line.get("logger", "")).startswith("grpc")


def _lines(log: Path) -> list[dict[str, Any]]:
    found = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            parsed = json.loads(line)
        except ValueError:
            continue
        if isinstance(parsed, dict):
            found.append(parsed)
    return found
