"""The attacked services, in a process of their own, and a client that uses them meanwhile.

The process reports its memory, tasks, connections and logged errors. After an attack they must be what they
were before (`settled`).
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from galley.pb.galley.v1 import galley_pb2 as pb
from tests.attack.bystander import DOORS, GOOD, GRPC, Bystander, beside
from tests.fakes.waiting import PATIENCE_S

BAD, EXPIRED, METERED = "bad-8d20e4b1", "expired-51c6f0aa", "metered-0b7d93ee"
_PRINCIPALS = (
    (GOOD, "good", ""),
    (BAD, "bad", ""),
    (METERED, "metered", ""),
    (EXPIRED, "late", "expires = 2020-01-01T00:00:00Z\n"),
)
MAX_SESSIONS = 16
METERED_TOKENS_PER_S, METERED_BURST = 1, 100
_LIMITS = f"""
[principals.bad]
max_sessions = {MAX_SESSIONS}
[principals.metered]
tokens_per_s = {METERED_TOKENS_PER_S}
burst_tokens = {METERED_BURST}
"""
MAX_MESSAGE_BYTES = 1 << 16
MIB = 1 << 20
MOST_HELD_S = 0.15
"""The longest that an attack may hold the event loop, in CPU time. The long form measures waits instead."""
CALL = "_handle_exceptions"
_REPLICA_STREAM = "_Connection._read"
SERVICES = ("gateway", "target", "draft", "collector")
HEALTH, HTTP = "health", "http"
"""Names of the gateway's further ports in addresses."""


@dataclass(frozen=True)
class ProcessState:
    """The state of the process.

    `connections` counts connections from other processes, `sessions` open streams, `items` open requests at
    the target, `logged` the bytes of its log; `errors` are the errors that it logged. `held_s` is the longest
    turn of its event loop since the state before, in CPU time, so that a busy machine does not lengthen it.
    """

    rss: int
    tasks: dict[str, int]
    connections: int
    threads: int
    sessions: int
    items: int
    errors: list[str]
    logged: int
    held_s: float

    @property
    def task_count(self) -> int:
        return sum(self.tasks.values())

    @property
    def calls(self) -> int:
        return self.tasks.get(CALL, 0)


class Attacked:
    def __init__(self, process: subprocess.Popen[bytes], log: Path, store: str, keys: Path) -> None:
        self.log = log
        self.store = store
        self.keys = keys
        self.held_s = 0.0
        self._process = process
        self._lock = threading.Lock()
        ready = self._read()
        self.addresses: dict[str, str] = ready["addresses"]
        self.metrics: dict[str, str] = ready["metrics"]
        self.traces = Path(ready["traces"])

    @property
    def gateway(self) -> str:
        return self.addresses["gateway"]

    @property
    def http(self) -> str:
        return self.addresses[HTTP]

    def address(self, door: str) -> str:
        return self.http if door == HTTP else self.gateway

    async def state(self) -> ProcessState:
        return await self._state("state")

    async def _state(self, command: str) -> ProcessState:
        state = ProcessState(**await asyncio.to_thread(self._command, command))
        self.held_s = max(self.held_s, state.held_s)
        return state

    async def connected(self) -> ProcessState:
        """Return the state once the gateway has a stream to the target and one to the draft.

        A former attack may have broken one; the next session that needs it opens it anew.
        """
        async with asyncio.timeout(PATIENCE_S):
            while (state := await self.state()).tasks.get(_REPLICA_STREAM, 0) < 2:
                await warmed_up(self)
        return state

    async def settled(self, before: ProcessState) -> ProcessState:
        """Return the state once no new connection and no task is left; fail if that never happens."""
        until_s = time.monotonic() + PATIENCE_S
        gc.collect()  # garbage of an attacker may hold its connections
        while True:
            state = await self._state(f"tasks-left {before.task_count}")
            if state.task_count <= before.task_count and state.connections <= before.connections:
                return state
            assert time.monotonic() < until_s, f"left behind: {leftovers(before, state)}"
            # Threads of gRPC close connections without an event to wait for.
            await asyncio.sleep(0.02)

    async def settled_but_one(self, before: ProcessState, spare: int = 60) -> ProcessState:
        """Return `settled`, apart from the tasks and two connections of one client that is still there."""
        tasks = before.tasks | {"somebody's": spare}
        return await self.settled(replace(before, tasks=tasks, connections=before.connections + 2))

    async def after_calls(self, calls: int) -> int:
        """Return the number of open calls, once there are `calls`."""
        return int((await asyncio.to_thread(self._command, f"calls-there {calls}"))["calls"])

    async def after_sessions(self, sessions: int) -> int:
        """Return the number of open streams, once there are at most `sessions`."""
        return int((await asyncio.to_thread(self._command, f"sessions-left {sessions}"))["sessions"])

    async def expect_error(self, event: str) -> None:
        """Wait for errors of `event` in the log, and accept them."""
        assert (await asyncio.to_thread(self._command, f"expect {event}"))["removed"], f"no {event!r}"

    async def forget_errors(self, event: str) -> None:
        """Accept errors of `event` in the log, if there are any."""
        await asyncio.to_thread(self._command, f"forget {event}")

    @contextmanager
    def keys_replaced_by_fifo(self) -> Iterator[None]:
        aside = self.keys.with_suffix(".aside")
        self.keys.rename(aside)
        os.mkfifo(self.keys)
        try:
            yield
        finally:
            aside.rename(self.keys)

    @contextmanager
    def out_of_files(self, spare: int) -> Iterator[Callable[[], bool]]:
        """Let the process open a few more files at most; yield whether it has opened them."""
        files = Path(f"/proc/{self._process.pid}/fd")
        before = resource.prlimit(self._process.pid, resource.RLIMIT_NOFILE)
        limit = max(int(path.name) for path in files.iterdir()) + 1 + spare
        resource.prlimit(self._process.pid, resource.RLIMIT_NOFILE, (limit, before[1]))
        try:
            yield lambda: len(list(files.iterdir())) >= limit
        finally:
            resource.prlimit(self._process.pid, resource.RLIMIT_NOFILE, before)

    def peak_rss(self) -> int:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        [line] = [line for line in status.splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) * 1024

    def forget_peak(self) -> None:
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")

    def stop(self) -> dict[str, Any]:
        outcome = self._command("stop")
        assert self._process.wait(PATIENCE_S) == 0
        return outcome

    def _command(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(command.encode() + b"\n")
            self._process.stdin.flush()
            return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        assert answer, f"the process is gone: {self.log.read_text()[-4000:]}"
        state: dict[str, Any] = json.loads(answer)
        return state


def leftovers(before: ProcessState, now: ProcessState) -> str:
    more = {name: count - before.tasks.get(name, 0) for name, count in now.tasks.items()}
    tasks = {name: count for name, count in more.items() if count > 0}
    return f"{now.connections - before.connections} connections, {tasks}"


@contextmanager
def attacked(store: str, tokenizer: Path) -> Iterator[Attacked]:
    with tempfile.TemporaryDirectory(prefix="galley-") as folder:
        directory = Path(folder)
        keys = directory / "keys" / "keys.toml"
        keys.parent.mkdir()
        keys.write_text("".join(_entry(*one) for one in _PRINCIPALS) + _LIMITS)
        log = directory / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                (sys.executable, "-m", "tests.attack.victim", store, str(tokenizer), str(directory)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                env={name: value for name, value in os.environ.items() if not name.startswith("OTEL_")},
            )
        with process:
            try:
                yield Attacked(process, log, store, keys)
            finally:
                process.kill()


def _entry(key: str, name: str, more: str) -> str:
    return f'[[keys]]\nprincipal = "{name}"\nsha256 = "{sha256(key.encode()).hexdigest()}"\n{more}'


@asynccontextmanager
async def undisturbed(stack: Attacked, door: str = GRPC) -> AsyncIterator[Bystander]:
    async with DOORS[door](stack.address(door)) as opened, beside(opened) as bystander:
        yield bystander


@asynccontextmanager
async def unharmed(
    stack: Attacked, door: str = GRPC, *, most_held_s: float = MOST_HELD_S
) -> AsyncIterator[ProcessState]:
    """Run a bystander beside the attack; afterwards nothing may be left of the attack."""
    before = await stack.connected()
    stack.held_s = 0.0
    async with undisturbed(stack, door):
        yield before
    after = await stack.settled(before)
    assert after.errors == before.errors
    assert (after.sessions, after.items) == (0, 0)
    assert after.rss - before.rss < 64 * MIB, f"{(after.rss - before.rss) / MIB:.0f} MiB stay taken"
    assert stack.held_s < most_held_s, f"the event loop was held for {stack.held_s:.3f} s"


def files_allowed() -> int:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


async def warmed_up(stack: Attacked) -> None:
    async with undisturbed(stack):
        pass


def hello() -> pb.GenerateRequest:
    return pb.GenerateRequest(text="hello", max_tokens=4, ignore_eos=True)
