"""The local stack: Valkey, targets, drafts and gateways, each a process.

    async with Stack(StackOptions(gateways=2)) as stack:
        first, second = stack.gateways

A part starts as soon as the parts that it needs are ready. If one cannot start, the others are stopped and
PartFailed is raised. A part that ends later ends the work of `run`, or is started again there.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from galley.stack.endpoint import Service
from galley.stack.options import PartTable, StackDirs, StackOptions, check_private, environment_of, lock
from galley.stack.part import Facts, OnStatus, Part, PartFacts, PartFailed, PartSpec, PartStatus
from galley.stack.parts import stack_parts
from galley.stack.restarts import OnChange, Restarts

__all__ = ["Facts", "PartSpec", "Stack", "StackDirs", "StackOptions"]

# On Linux the path of a unix socket has at most 107 bytes.
_MAX_RUN_DIR = 80
_BLAME_S = 1.0

T = TypeVar("T")


def ignore_status(_: PartStatus) -> None: ...


class Stack:
    """The parts of one local stack. Use it from the main thread: parts end with their starting thread."""

    def __init__(
        self,
        options: StackOptions,
        on_status: OnStatus = ignore_status,
        parts: PartTable = stack_parts,
    ) -> None:
        self.options = options
        for name in ("gateways", "replicas", "tensor_parallel", "drafts"):
            if getattr(options, name) < 1:
                raise ValueError(f"{name}: must be at least 1, got {getattr(options, name)}")
        self.dirs = _make_dirs(options)
        env = environment_of(options)
        self._parts = {
            spec.name: Part(spec, self.dirs.logs / f"{spec.name}.log", env, on_status)
            for spec in parts(options, self.dirs)
        }
        self._facts: dict[str, PartFacts] = {}
        self._failed = False
        self._lock: int | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self._parts)

    @property
    def gateways(self) -> tuple[str, ...]:
        return tuple(self.address(name) for name in self._parts if name.startswith("gateway"))

    @property
    def http_addresses(self) -> tuple[str, ...]:
        """Return the addresses of the gateways' HTTP APIs."""
        facts = [self._facts[name] for name in self._parts if name.startswith("gateway")]
        return tuple(str(fact["http"]) for fact in facts if fact.get("http"))

    def address(self, part: str) -> str:
        return str(self._facts[part]["address"])

    @property
    def services(self) -> tuple[Service, ...]:
        ready = {name: self._facts[name] for name in self._parts if name in self._facts}
        return tuple(
            Service(name, str(facts["metrics"]), str(facts.get("address", "")))
            for name, facts in ready.items()
            if facts.get("metrics")
        )

    @property
    def store_url(self) -> str:
        """Return the URL of the embedded store; empty for the user's own, whose URL may hold a password."""
        return "" if self.options.redis_url else f"unix://{self.address('valkey')}"

    @property
    def running(self) -> tuple[str, ...]:
        return tuple(name for name, part in self._parts.items() if part.is_running)

    def facts(self, part: str) -> PartFacts:
        return self._facts[part]

    def pid(self, part: str) -> int:
        return self._parts[part].pid

    def log(self, part: str) -> Path:
        return self._parts[part].log

    def send(self, part: str, sig: signal.Signals) -> None:
        self._parts[part].send(sig)

    async def kill(self, part: str) -> None:
        await self._parts[part].kill()

    async def ended(self, part: str) -> None:
        await self._parts[part].ended()

    async def restart(self, part: str) -> None:
        """Start a part again that has ended, at its old address unless it registers itself in the store."""
        await self._start_part(self._parts[part])

    async def __aenter__(self) -> Self:
        if not self._facts:
            await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start all parts. Raises PartFailed, with nothing left running, if one cannot start.

        Raises ValueError if another stack uses the directory of the data.
        """
        try:
            self._lock = lock(self.dirs.data)
        except (OSError, ValueError):
            self.forget()
            raise
        ready = {name: asyncio.Event() for name in self._parts}
        try:
            async with asyncio.TaskGroup() as group:
                for part in self._parts.values():
                    group.create_task(self._start_after(part, ready), name=f"start {part.spec.name}")
        except BaseExceptionGroup as failures:
            self._failed = True
            await self.stop()
            raise _first(failures) from None
        except asyncio.CancelledError:
            await self.stop()
            raise

    async def _start_after(self, part: Part, ready: Mapping[str, asyncio.Event]) -> None:
        for name in part.spec.after:
            await ready[name].wait()
        await self._start_part(part)
        ready[part.spec.name].set()

    async def _start_part(self, part: Part) -> None:
        self._facts[part.spec.name] = await part.start(self._facts, self.options.start_timeout_s)

    async def _start_again(self, part: Part) -> None:
        self._failed = True  # so that the log with the reason is kept
        await self._start_part(part)

    async def failure(self, on_change: OnChange | None = None) -> PartFailed:
        """Wait until one of the vital parts that run now ends; return its failure. Logs are then kept.

        With `on_change`, parts that have a pool are started again, and given up if they end again and again.
        """
        vital = [part for part in self._parts.values() if part.is_running and part.spec.vital]
        restarts = Restarts(vital, self._start_again, on_change, self.options.restart_pause_s)
        failed = await restarts.failure()
        self._failed = True
        return failed

    async def run(self, work: Coroutine[Any, Any, T], on_change: OnChange | None = None) -> T:
        """Return the result of `work`. If a vital part dies meanwhile, cancel it and raise PartFailed.

        With `on_change`, parts that have a pool are started again and reported; the work ends once all of a
        pool are given up.
        """
        working, dying = asyncio.ensure_future(work), asyncio.ensure_future(self.failure(on_change))
        try:
            await asyncio.wait([working, dying], return_when=asyncio.FIRST_COMPLETED)
            if working.done() and not working.cancelled() and working.exception() is not None:
                # The death of a part may be the reason, noticed a moment later.
                await asyncio.wait([dying], timeout=_BLAME_S)
            if dying.done():
                raise dying.result()
            return working.result()
        finally:
            working.cancel()
            dying.cancel()
            await asyncio.wait([working, dying])

    async def stop(self) -> None:
        """Stop all parts, dependent ones first. Remove the temporary directory, but not logs of failures."""
        while running := [part for part in self._parts.values() if part.is_running]:
            needed = {name for part in running for name in part.spec.after}
            idle = [part for part in running if part.spec.name not in needed]
            async with asyncio.TaskGroup() as group:
                for part in idle:
                    group.create_task(part.stop(self.options.stop_grace_s))
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if not self._failed:
            self.forget()
        elif self.options.data_dir is None:
            shutil.rmtree(self.dirs.data, ignore_errors=True)  # it holds prompts

    def forget(self) -> None:
        """Remove the temporary directory, with logs and data that have no directory of their own."""
        shutil.rmtree(self.dirs.run, ignore_errors=True)


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the failure that came first; TaskGroup keeps their order."""
    error: BaseException = failures
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _make_dirs(options: StackOptions) -> StackDirs:
    if options.data_dir is not None:
        check_private(options.data_dir)
    run = Path(tempfile.mkdtemp(prefix="galley-"))
    if len(str(run)) > _MAX_RUN_DIR:
        run.rmdir()
        run = Path(tempfile.mkdtemp(prefix="galley-", dir="/tmp"))
    dirs = StackDirs(run, options.data_dir or run / "data", options.log_dir or run / "logs")
    dirs.data.mkdir(mode=0o700, parents=True, exist_ok=True)
    dirs.logs.mkdir(parents=True, exist_ok=True)
    return dirs
