"""The attacked services, each in a process of its own, and a client that uses them meanwhile.

Each process reports its memory, tasks and logged errors. After an attack they, and the connections, must be
what they were before (`settled`).
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
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil

from galley.pb.galley.v1 import galley_pb2 as pb
from tests.attack.bystander import GOOD, GRPC, PROTOCOLS, Bystander, beside
from tests.fakes.waiting import PATIENCE_S

BAD, EXPIRED = "bad-8d20e4b1", "expired-51c6f0aa"
METERED, METERED_HTTP = "metered-0b7d93ee", "metered-by-http-5a0c13d2"
_PRINCIPALS = (
    (GOOD, "good", ""),
    (BAD, "bad", ""),
    (METERED, "metered", ""),
    (METERED_HTTP, "metered-by-http", ""),
    (EXPIRED, "late", "expires = 2020-01-01T00:00:00Z\n"),
)
MAX_SESSIONS = 16
METERED_TOKENS_PER_S, METERED_BURST = 1, 100
_LIMITS = f"""
[principals.bad]
max_sessions = {MAX_SESSIONS}
""" + "".join(
    f"[principals.{name}]\ntokens_per_s = {METERED_TOKENS_PER_S}\nburst_tokens = {METERED_BURST}\n"
    for name in ("metered", "metered-by-http")
)
MAX_MESSAGE_BYTES = 1 << 16
MIB = 1 << 20
MOST_KEPT = 64 * MIB
MOST_HELD_S = 0.08
"""The longest that an attack may hold the event loop, in CPU time: all turns between two ticks, 10 ms apart.

No turn of a call takes more than 5 ms (test_turns.py). The long form measures waits instead.
"""
CALL = "_handle_exceptions"
_REPLICA_STREAM = "_Connection._read"
SERVICES = ("gateway", "target", "draft", "collector")
_STARTED = ("collector", "target", "draft", "gateway")
TRACES = "traces.jsonl"
HEALTH, HTTP = "health", "http"
"""Names of the gateway's further ports in addresses."""


@dataclass(frozen=True)
class ProcessState:
    """The state of all processes.

    `tasks` counts tasks by service and name, `connections` those from other processes, `sessions` open
    streams, `items` open requests at the target, `logged` the bytes of the log; `errors` are the errors that
    they logged. `held_s` is the longest turn of an event loop since the state before, in CPU time, so that a
    busy machine does not lengthen it.
    """

    rss: int
    tasks: dict[str, Counter[str]]
    connections: int
    threads: int
    sessions: int
    items: int
    errors: list[str]
    logged: int
    held_s: float

    def calls(self, service: str) -> int:
        """Return the number of open calls of a service."""
        return self.tasks[service][CALL]


class ServiceProcess:
    """The process of one service, which answers commands."""

    def __init__(self, service: str, log: Path, *arguments: str) -> None:
        self._log = log
        self._lock = threading.Lock()
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                (sys.executable, "-m", "tests.attack.victim", service, *arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                env={name: value for name, value in os.environ.items() if not name.startswith("OTEL_")},
            )
        self.ready = self._read()

    def command(self, command: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        with self._lock:
            self.process.stdin.write(command.encode() + b"\n")
            self.process.stdin.flush()
            return self._read()

    def stop(self) -> dict[str, Any]:
        outcome = self.command("stop")
        assert self.process.wait(PATIENCE_S) == 0
        return outcome

    def kill(self) -> None:
        with self.process:
            self.process.kill()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer = self.process.stdout.readline()
        assert answer, f"the process is gone: {self._log.read_text()[-4000:]}"
        values: dict[str, Any] = json.loads(answer)
        return values


class Attacked:
    def __init__(self, services: Mapping[str, ServiceProcess], directory: Path, store: str) -> None:
        self.log = directory / "log"
        self.keys = directory / "keys" / "keys.toml"
        self.traces = directory / TRACES
        self.store = store
        self.held_s = 0.0
        self._services = services
        self.addresses: dict[str, str] = {}
        for service in services.values():
            self.addresses |= service.ready["addresses"]
        ready = {name: one.ready["metrics"] for name, one in services.items()}
        self.metrics: dict[str, str] = {name: address for name, address in ready.items() if address}

    @property
    def gateway(self) -> str:
        return self.addresses["gateway"]

    @property
    def http(self) -> str:
        return self.addresses[HTTP]

    def address(self, protocol: str) -> str:
        return self.http if protocol == HTTP else self.gateway

    async def state(self) -> ProcessState:
        return await self._state(dict.fromkeys(self._services, "state"))

    async def _state(self, commands: Mapping[str, str]) -> ProcessState:
        """Return the state once each service has answered its command."""
        states = await asyncio.gather(
            *(asyncio.to_thread(self._services[name].command, each) for name, each in commands.items())
        )
        state = ProcessState(
            tasks={name: Counter(one["tasks"]) for name, one in zip(commands, states, strict=True)},
            errors=[line for one in states for line in one["errors"]],
            held_s=max(one["held_s"] for one in states),
            connections=await asyncio.to_thread(self._connections),
            logged=self.log.stat().st_size,
            **{name: sum(one[name] for one in states) for name in ("rss", "threads", "sessions", "items")},
        )
        self.held_s = max(self.held_s, state.held_s)
        return state

    def _connections(self) -> int:
        """Return the number of connections to the services that none of them made."""
        served = {int(one.rpartition(":")[2]) for one in (*self.addresses.values(), *self.metrics.values())}
        results: list[Any] = []
        for service in self._services.values():
            results += psutil.Process(service.process.pid).net_connections("tcp")
        ends = {(one.laddr.port, one.raddr.port) for one in results if one.raddr}
        return sum(port in served and (peer, port) not in ends for port, peer in ends)

    async def connected(self) -> ProcessState:
        """Return the state once the gateway has a stream to the target and one to the draft.

        A former attack may have broken one; the next session that needs it opens it anew.
        """
        async with asyncio.timeout(PATIENCE_S):
            while (state := await self.state()).tasks["gateway"][_REPLICA_STREAM] < 2:
                await warmed_up(self)
        return state

    async def settled(self, before: ProcessState, spare: int = 0) -> ProcessState:
        """Return the state once no new connection and no task is left; fail if that never happens.

        `spare` tasks of each process, and two connections, may be of one client that is still there.
        """
        until_s = time.monotonic() + PATIENCE_S
        gc.collect()  # garbage of an attacker may hold its connections
        most = {name: tasks.total() + spare for name, tasks in before.tasks.items()}
        connections = before.connections + (2 if spare else 0)
        while True:
            state = await self._state({name: f"tasks-left {count}" for name, count in most.items()})
            has_ended = all(tasks.total() <= most[name] for name, tasks in state.tasks.items())
            if has_ended and state.connections <= connections:
                return state
            assert time.monotonic() < until_s, f"left behind: {leftovers(before, state)}"
            # Threads of gRPC close connections without an event to wait for.
            await asyncio.sleep(0.02)

    async def after_calls(self, service: str, calls: int) -> int:
        """Return the number of open calls of a service, once there are `calls`."""
        command = self._services[service].command
        return int((await asyncio.to_thread(command, f"calls-there {calls}"))["calls"])

    async def after_sessions(self, sessions: int) -> int:
        """Return the number of open streams, once there are at most `sessions`."""
        return int(
            (await asyncio.to_thread(self._of_gateway.command, f"sessions-left {sessions}"))["sessions"]
        )

    async def expect_error(self, event: str) -> None:
        """Wait for errors of `event` in the gateway's log, and accept them."""
        assert (await asyncio.to_thread(self._of_gateway.command, f"expect {event}"))["removed"], (
            f"no {event!r}"
        )

    async def forget_errors(self, event: str) -> None:
        """Accept errors of `event` in the gateway's log, if there are any."""
        await asyncio.to_thread(self._of_gateway.command, f"forget {event}")

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
        """Let the gateway open a few more files at most; yield whether it has opened them."""
        pid = self._of_gateway.process.pid
        files = Path(f"/proc/{pid}/fd")
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        limit = max(int(path.name) for path in files.iterdir()) + 1 + spare
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, before[1]))
        try:
            yield lambda: len(list(files.iterdir())) >= limit
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)

    def peak_rss(self) -> int:
        """Return the sum of the peaks of all processes."""
        return sum(_peak_rss(pid) for pid in self._pids)

    def forget_peak(self) -> None:
        for pid in self._pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    def stop(self) -> dict[str, Any]:
        """Stop the gateway first, the collector last; return what they leave behind."""
        outcomes = [self._services[name].stop() for name in reversed(_STARTED)]
        return {
            "tasks": sum(one["tasks"] for one in outcomes),
            "errors": [line for one in outcomes for line in one["errors"]],
        }

    @property
    def _of_gateway(self) -> ServiceProcess:
        return self._services["gateway"]

    @property
    def _pids(self) -> list[int]:
        return [service.process.pid for service in self._services.values()]


def leftovers(before: ProcessState, now: ProcessState) -> str:
    tasks = {name: dict(counts - before.tasks[name]) for name, counts in now.tasks.items()}
    return f"{now.connections - before.connections} connections, {tasks}"


def _peak_rss(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


@contextmanager
def attacked(store: str, tokenizer: Path) -> Iterator[Attacked]:
    with tempfile.TemporaryDirectory(prefix="galley-") as folder, ExitStack() as held:
        directory = Path(folder)
        keys = directory / "keys" / "keys.toml"
        keys.parent.mkdir()
        keys.write_text("".join(_entry(*one) for one in _PRINCIPALS) + _LIMITS)
        services: dict[str, ServiceProcess] = {}
        for name in _STARTED:
            peers = json.dumps({of: one.ready["addresses"][of] for of, one in services.items()})
            arguments = (store, str(tokenizer), folder, peers)
            services[name] = ServiceProcess(name, directory / "log", *arguments)
            held.callback(services[name].kill)
        yield Attacked(services, directory, store)


def _entry(key: str, name: str, more: str) -> str:
    return f'[[keys]]\nprincipal = "{name}"\nsha256 = "{sha256(key.encode()).hexdigest()}"\n{more}'


@asynccontextmanager
async def undisturbed(stack: Attacked, protocol: str = GRPC) -> AsyncIterator[Bystander]:
    async with PROTOCOLS[protocol](stack.address(protocol)) as caller, beside(caller) as bystander:
        yield bystander


@asynccontextmanager
async def unharmed(
    stack: Attacked, protocol: str = GRPC, *, most_held_s: float = MOST_HELD_S, most_kept: int = MOST_KEPT
) -> AsyncIterator[ProcessState]:
    """Run a bystander beside the attack; afterwards nothing may be left of the attack."""
    before = await stack.connected()
    stack.held_s = 0.0
    async with undisturbed(stack, protocol):
        yield before
    after = await stack.settled(before)
    assert after.errors == before.errors
    assert (after.sessions, after.items) == (0, 0)
    assert after.rss - before.rss < most_kept, f"{(after.rss - before.rss) / MIB:.0f} MiB stay taken"
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
