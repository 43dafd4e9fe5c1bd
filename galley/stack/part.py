"""One part of the local stack: an operating system process, from its start to its end.

Every part runs under `guard.py`, in its own operating system session (setsid), so Ctrl-C reaches only the
process that started the stack. On Linux the part ends when that process ends, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from galley.stack import guard
from galley.stack.ports import LOOPBACK

PartFacts = Mapping[str, Any]
"""What a part reports when it is ready, such as {"address": "127.0.0.1:4711"}."""
Facts = Mapping[str, PartFacts]
"""The facts of the ready parts, by part name."""

_CONNECT_TIMEOUT_S = 1.5
_TAIL_LINES = 20
_PING_PERIOD_S = 0.01
_LOG_FLUSH_S = 5.0


class State(enum.StrEnum):
    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class PartSpec:
    """A process to run once the parts named in `after` are ready.

    It gets `--ready-fd N` and writes JSON lines there: {"stage": ...}, at last {"stage": "ready", ...}, its
    facts. With a unix `socket` it is ready when it answers a PING there instead, with `ports` when all accept
    connections (the first is its address), and if it `exits`, when it ends with exit code 0: each line of its
    output is a stage, and {"line": the last one} are its facts.

    `command` and `environment` are given the facts of the parts in `after`. A `niceness` above 0 gives the
    other parts precedence where cores are few. `umask` applies to the files that it makes; -1: inherited. The
    stack outlives a part that is not `vital`. Parts with a `pool` can be started again; the stack ends
    once all of a pool are given up.
    """

    name: str
    command: Callable[[Facts], Sequence[str]]
    after: tuple[str, ...] = ()
    socket: Path | None = None
    ports: tuple[int, ...] = ()
    exits: bool = False
    niceness: int = 0
    environment: Callable[[Facts], Mapping[str, str]] = lambda _: {}
    vital: bool = True
    pool: str = ""
    umask: int = -1

    @property
    def is_service(self) -> bool:
        """Return True if the process reports by `--ready-fd`, as Galley's services do."""
        return not (self.socket or self.ports or self.exits)


@dataclass(frozen=True, slots=True)
class PartStatus:
    """A change of one part; `elapsed_s` counts from the start of its process."""

    name: str
    state: State
    stage: str
    elapsed_s: float
    address: str = ""


OnStatus = Callable[[PartStatus], None]


class PartFailed(Exception):
    """A part did not become ready, or died. `tail` is the end of its log."""

    def __init__(self, name: str, problem: str, log: Path) -> None:
        super().__init__(f"{name} {problem}")
        self.name = name
        self.problem = problem
        self.log = log
        self.tail = log_tail(log)


def log_tail(log: Path, lines: int = _TAIL_LINES) -> str:
    if not log.exists():
        return ""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


class Part:
    """The process of one spec. Call `start` from the main thread; `stop` may be repeated."""

    def __init__(self, spec: PartSpec, log: Path, env: Mapping[str, str], on_status: OnStatus) -> None:
        self.spec = spec
        self.log = log
        self._env = env
        self._environment: dict[str, str] = {}
        self._on_status = on_status
        self._process: asyncio.subprocess.Process | None = None
        self._started_at = 0.0

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError(f"{self.spec.name} was not started")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self, facts: Facts, timeout_s: float) -> PartFacts:
        """Run the command; return its facts when ready. Call `stop` even if it raises PartFailed."""
        self._started_at = time.monotonic()
        self._report(State.STARTING, "starting")
        command, spec = list(self.spec.command(facts)), self.spec
        self._environment = {**self._env, **spec.environment(facts)}
        try:
            async with asyncio.timeout(timeout_s):
                if path := spec.socket:
                    own = await self._until(command, str(path), lambda: is_answering(path))
                elif spec.ports:
                    address = f"{LOOPBACK}:{spec.ports[0]}"
                    own = await self._until(command, address, lambda: is_listening(spec.ports))
                else:
                    own = await (self._until_done(command) if spec.exits else self._until_ready(command))
        except TimeoutError:
            raise self._failure(f"was not ready after {timeout_s:g} s") from None
        self._report(State.READY, "ready", str(own.get("address", "")))
        return own

    async def _spawn(self, command: Sequence[str], **kwargs: Any) -> asyncio.subprocess.Process:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "parts are tied to the thread that starts them: start them from the main thread"
            )
        guard_args = [str(os.getpid()), str(self.spec.niceness)]
        guarded = [sys.executable, "-I", "-S", guard.__file__, *guard_args, *command]
        try:
            with self.log.open("ab") as log:
                options = {"stdin": asyncio.subprocess.DEVNULL, "stdout": log, "stderr": log, **kwargs}
                options |= {"env": self._environment, "umask": self.spec.umask, "start_new_session": True}
                self._process = await asyncio.create_subprocess_exec(*guarded, **options)
        except OSError as error:  # such as too little memory for another process
            raise self._failure(f"cannot be started: {error.strerror}") from None
        return self._process

    async def _until_ready(self, command: Sequence[str]) -> PartFacts:
        read_fd, write_fd = os.pipe()
        with os.fdopen(read_fd, "rb", buffering=0) as pipe:
            try:
                await self._spawn([*command, "--ready-fd", str(write_fd)], pass_fds=(write_fd,))
            finally:
                os.close(write_fd)
            async with lines(pipe) as messages:
                async for line in messages:
                    message = self._message(line)
                    if message.get("stage") == "ready":
                        return message
                    self._report(State.STARTING, str(message.get("stage", "")))
        raise await self._ended_early()

    def _message(self, line: bytes) -> PartFacts:
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise self._failure(f"wrote {line!r} instead of a JSON object")
        return message

    async def _until(
        self, command: Sequence[str], address: str, holds: Callable[[], Awaitable[bool]]
    ) -> PartFacts:
        process = await self._spawn(command)
        while not await holds():
            if process.returncode is not None:
                raise await self._ended_early()
            await asyncio.sleep(_PING_PERIOD_S)
        return {"address": address}

    async def _until_done(self, command: Sequence[str]) -> PartFacts:
        process = await self._spawn(command, stdout=asyncio.subprocess.PIPE)
        line = b""
        if process.stdout is not None:
            async for line in process.stdout:
                self._report(State.STARTING, line.decode(errors="replace").strip())
        if await process.wait() != 0:
            raise await self._ended_early()
        return {"line": line.decode(errors="replace").strip()}

    async def _ended_early(self) -> PartFailed:
        """Return the failure of a part that ended, or closed its pipe, before it was ready."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOG_FLUSH_S):
                await self.ended()
        if self.is_running:
            return self._failure("closed its ready pipe before it was ready")
        return self._failure(f"{self._how_it_ended()} before it was ready")

    async def died(self) -> PartFailed:
        await self.ended()
        return self._failure(self._how_it_ended())

    async def ended(self) -> None:
        if self._process is not None:
            await self._process.wait()

    def _how_it_ended(self) -> str:
        code = self._process.returncode if self._process is not None else None
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def _failure(self, problem: str) -> PartFailed:
        self._report(State.FAILED, problem)
        return PartFailed(self.spec.name, problem, self.log)

    def send(self, sig: signal.Signals) -> None:
        if self.is_running:
            os.kill(self.pid, sig)

    async def stop(self, grace_s: float) -> None:
        """Send SIGTERM; if the part runs on for `grace_s` seconds, send SIGKILL to its process group."""
        if not self.is_running:
            return
        self._report(State.STOPPED, "stopping")
        self.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self.ended()
        except TimeoutError:
            await self.kill()
        self._report(State.STOPPED, "stopped")

    async def kill(self) -> None:
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        await self.ended()

    def _report(self, state: State, stage: str, address: str = "") -> None:
        elapsed_s = time.monotonic() - self._started_at
        self._on_status(PartStatus(self.spec.name, state, stage, elapsed_s, address))


@contextlib.asynccontextmanager
async def lines(pipe: IO[bytes]) -> Any:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        yield reader
    finally:
        transport.close()


async def is_listening(ports: Sequence[int]) -> bool:
    return not any([await _problem("", asyncio.open_connection(LOOPBACK, port)) for port in ports])


async def is_answering(path: Path) -> bool:
    """Return True if a Redis server on this unix socket answers a PING."""
    try:
        reader, writer = await asyncio.open_unix_connection(path)
    except OSError:
        return False
    try:
        writer.write(b"PING\r\n")
        return (await reader.readline()).startswith(b"+PONG")
    except OSError:
        return False
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def unreachable(redis_url: str) -> str:
    """Return why no server of a Redis URL accepts connections; "" if one does. Raises ValueError."""
    from galley.common.redis.url import parse_redis_url  # noqa: PLC0415  # an extra

    url = parse_redis_url(redis_url)
    attempts = [_problem(f"{host}:{port}", asyncio.open_connection(host, port)) for host, port in url.hosts]
    if url.path:
        attempts.append(_problem(url.path, asyncio.open_unix_connection(url.path)))
    problems = await asyncio.gather(*attempts)
    return "; ".join(problems) if all(problems) else ""


async def _problem(place: str, connect: Coroutine[Any, Any, tuple[object, asyncio.StreamWriter]]) -> str:
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            _, writer = await connect
    except OSError as error:  # TimeoutError among them
        return f"cannot reach {place}: {_reason(error)}"
    writer.close()
    return ""


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return f"no response within {_CONNECT_TIMEOUT_S:g} s"
    # asyncio joins the errors of several addresses of one name into a text without an errno.
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
