"""One service that is attacked: `python -m tests.attack.victim SERVICE STORE TOKENIZER DIRECTORY ADDRESSES`.

It runs collector, target, draft or gateway as in production, with traces and metrics on; the target's engine
knows its tokens. ADDRESSES, in JSON, are of the services that run already. The process writes its addresses
to stdout, then answers commands on stdin, one on each line.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import grpc
import psutil

from galley.common.config.settings import ServiceSettings
from galley.common.logs import start_logging
from galley.common.metrics.metering import start_metering
from galley.common.models.files import tokenizer_hash
from galley.common.models.grammars import ReplicaGrammars
from galley.common.server.garbage import collect_seldom
from galley.common.server.loop import ServiceLoop
from galley.common.server.process import die_with_parent, hand_back_free_memory
from galley.common.server.server import Interceptors, Parts, RunningServer, start_server
from galley.common.tracing.telemetry import start_telemetry
from galley.core.cost.model import StepTimes
from galley.core.grammar.vocabulary import Vocabulary
from galley.core.step import StepOutcome, StepPlan, StepTrace
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from galley.trace.collector import CollectorSettings
from galley.trace.collector import build as build_collector
from services.draft.__main__ import build as build_draft
from services.draft.settings import DraftSettings
from services.gateway.service import prepare
from services.gateway.settings import GatewaySettings
from services.gateway.versions import keeper
from services.target.engine.protocol import Limits
from services.target.servicer import TargetService
from services.target.settings import TargetSettings
from tests.attack.stack import CALL, HEALTH, HTTP, MAX_MESSAGE_BYTES, TRACES, files_allowed
from tests.fakes.engine import KnownEngine
from tests.fakes.truth import END, VOCAB, true_next
from tests.fakes.world import NO_CALLER

_PASS_S = 0.002
_TICK_S = 0.01
_UNREAD_S = 3600.0
"""Time between two reads of the versions of drafts: tests count the commands that calls cause."""
_TIMES = StepTimes.measured([(1, 2_000_000), (1024, 2_000_001)])


class Engine(KnownEngine):
    def run(self, plan: StepPlan, watch: StepTrace | None = None) -> list[StepOutcome]:
        time.sleep(_PASS_S)
        return super().run(plan, watch)

    def token(self, seed: int, position: int, history: Sequence[int]) -> int:
        return true_next(history, seed)


class Turns:
    """The longest turn of the event loop in CPU time: how long one call can keep all others waiting."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._began_s = time.thread_time()

    def start(self) -> None:
        now_s = time.thread_time()
        self.longest_s = max(self.longest_s, now_s - self._began_s)
        self._began_s = now_s
        asyncio.get_running_loop().call_later(_TICK_S, self.start)

    def forget(self) -> None:
        self.longest_s = 0.0
        self._began_s = time.thread_time()


class Victim:
    def __init__(
        self, service: str, store: str, tokenizer: Path, directory: Path, peers: dict[str, str]
    ) -> None:
        self._service = service
        self._store = store
        self._tokenizer = tokenizer
        self._directory = directory
        self._peers = peers
        self._errors = _Errors()
        self._turns = Turns()
        self._running: RunningServer
        self._metrics = self._http = ""

    async def serve(self) -> None:
        logging.getLogger().addHandler(self._errors)
        asyncio.get_running_loop().set_exception_handler(self._errors.unhandled)
        if collector := self._peers.get("collector"):
            os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://{collector}"
            os.environ["OTEL_METRICS_EXPORTER"] = "none"
            os.environ["OTEL_TRACES_SAMPLER"] = "parentbased_traceidratio"
            os.environ["OTEL_TRACES_SAMPLER_ARG"] = "0.1"
        async with AsyncExitStack() as opened:
            await self._start(opened, *self._prepared())
            opened.callback(collect_seldom().cancel)
            commands = await _lines()
            addresses = {self._service: self._running.address}
            if self._http:
                addresses |= {HEALTH: self._running.health_address, HTTP: self._http}
            _write({"addresses": addresses, "metrics": self._metrics})
            self._turns.start()
            while (command := (await commands.readline()).decode().strip()) not in {"", "stop"}:
                _write(await self._answer(*command.split(maxsplit=1)))
        _write({"tasks": len(asyncio.all_tasks()) - 1, "errors": self._errors.lines})

    def _prepared(self) -> tuple[ServiceSettings, Any, Interceptors]:
        common: dict[str, Any] = {"max_message_bytes": MAX_MESSAGE_BYTES, "drain_timeout_s": 5}
        if self._service == "collector":
            collector = CollectorSettings(file=self._directory / TRACES, **common)
            return collector, build_collector(collector), lambda _: ()
        if self._service == "target":
            return TargetSettings(**common), self._build_target, lambda _: ()
        if self._service == "draft":
            draft = DraftSettings(tokenizer=str(self._tokenizer), max_kv_tokens=16384, **common)
            return draft, build_draft(draft), lambda _: ()
        gateway = GatewaySettings.model_validate(
            {
                "target": self._peers["target"],
                "draft": self._peers["draft"],
                "redis_url": self._store,
                "model": str(self._tokenizer),
                "target_models": "known",
                "api_keys_file": str(self._directory / "keys" / "keys.toml"),
                "client_timeout_s": 2.0,
                "health_port": 0,
                "http_port": 0,
                **common,
            }
        )
        keeper.READ_S = _UNREAD_S
        prepared = prepare(gateway)
        return gateway, prepared.build, prepared.interceptors

    async def _start(
        self, opened: AsyncExitStack, settings: ServiceSettings, build: Any, own: Interceptors
    ) -> None:
        metering = await start_metering(self._service, settings.host, 0)
        opened.push_async_callback(metering.close)
        telemetry = start_telemetry(f"galley-{self._service}", as_global=False)
        opened.push_async_callback(asyncio.to_thread, telemetry.shutdown)
        parts = Parts(telemetry=telemetry, metrics=metering.registry)
        self._running = await start_server(settings, build, parts, own)
        opened.push_async_callback(self._running.stop)
        self._http = parts.addresses.get("http", "")
        self._metrics = metering.address

    async def _build_target(self, server: grpc.aio.Server, parts: Parts) -> TargetService:
        tokenizer = tokenizer_hash(self._tokenizer)
        engine = Engine(tokenizer_hash=tokenizer, vocab_size=VOCAB, eos_token_ids=(END,))
        served = engine.serve(_TIMES, Limits())
        grammars = ReplicaGrammars(self._vocabulary())
        target = TargetService(served, parts.telemetry.scope("target"), parts.metrics, grammars=grammars)
        rpc.add_TargetServicer_to_server(target, server)
        return target

    def _vocabulary(self) -> Vocabulary:
        text = (self._tokenizer / "tokenizer.json").read_text()
        return Vocabulary.of_tokenizer(text, VOCAB, [END], time.monotonic_ns)

    async def _answer(self, name: str, value: str = "0") -> dict[str, Any]:
        if name == "expect":
            await self._until(lambda: self._errors.has(value))
        if name in {"expect", "forget"}:
            return {"removed": self._errors.remove(value)}
        await self._until(self._condition(name, int(value)))
        return self._counts() if name in {"calls-there", "sessions-left"} else self._state()

    def _condition(self, name: str, count: int) -> Callable[[], bool]:
        conditions: dict[str, Callable[[], bool]] = {
            "state": lambda: True,
            "tasks-left": lambda: len(_tasks()) <= count,
            "calls-there": lambda: _tasks().count(CALL) >= count,
            "sessions-left": lambda: self._sessions <= count,
        }
        return conditions[name]

    async def _until(self, holds: Callable[[], bool], patience_s: float = 10.0) -> None:
        until_s = time.monotonic() + patience_s
        while (looked_s := time.monotonic()) < until_s and not holds():  # noqa: ASYNC110
            # Counting thousands of tasks is slow, so it takes at most a tenth of the time.
            await asyncio.sleep(max(0.01, 10 * (time.monotonic() - looked_s)))

    @property
    def _sessions(self) -> int:
        if self._service != "gateway":
            return 0
        return int(cast("Any", self._running.service)._streams.held)

    def _counts(self) -> dict[str, int]:
        return {"calls": _tasks().count(CALL), "sessions": self._sessions}

    def _state(self) -> dict[str, Any]:
        held_s = self._turns.longest_s
        gc.collect()
        hand_back_free_memory()
        self._turns.forget()  # the collection, which no call has caused
        service = self._running.service
        return {
            "held_s": held_s,
            "rss": psutil.Process().memory_info().rss,
            "tasks": Counter(_tasks()),
            "threads": threading.active_count(),
            "sessions": self._sessions,
            "items": service.describe().queue_depth if isinstance(service, TargetService) else 0,
            "errors": self._errors.lines,
        }


class _Errors(logging.Handler):
    """Collect logged errors and unhandled exceptions, except lost spans and responses without a caller."""

    _MOST = 20

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{record.name}: {record.msg}"
        if line.startswith(("opentelemetry.exporter.", NO_CALLER)):
            return
        problem = record.exc_info and record.exc_info[1]
        self._note(f"{line} {problem!r}")

    def unhandled(self, loop: asyncio.AbstractEventLoop, what: dict[str, Any]) -> None:
        self._note(f"unhandled: {what.get('message')} {what.get('exception')!r}")
        loop.default_exception_handler(what)

    def has(self, event: str) -> bool:
        return any(event in line for line in self.lines)

    def remove(self, event: str) -> int:
        """Forget the errors of an event; return how many they were."""
        kept = [line for line in self.lines if event not in line]
        removed, self.lines = len(self.lines) - len(kept), kept
        return removed

    def _note(self, line: str) -> None:
        if len(self.lines) < self._MOST:
            self.lines.append(line[:500])


def _tasks() -> list[str]:
    names = [str(getattr(task.get_coro(), "__qualname__", "?")) for task in asyncio.all_tasks()]
    return [name for name in names if not name.startswith("AioServer._request_")]


async def _lines() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    return reader


def _write(values: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def main() -> None:
    die_with_parent()
    files_allowed()
    service, store, tokenizer, directory, peers = sys.argv[1:]
    start_logging(service, "info")
    with asyncio.Runner(loop_factory=ServiceLoop) as runner:
        runner.run(Victim(service, store, Path(tokenizer), Path(directory), json.loads(peers)).serve())


if __name__ == "__main__":
    main()
