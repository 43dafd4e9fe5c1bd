"""`python -m bench.telemetry_parts`: what traces and metrics cost in one process, by part, in CPU time.

Each part is done many times in a row, exports to a collector included (bench/otlp_sink.py, in a process of
its own), and the least of several tries counts. So caches are warm, and nothing else is done meanwhile: the
same work costs a busy service several times as much. What `make bench-telemetry` says of a whole stack is the
truth; this tells where to look.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Callable
from typing import Any, cast

from opentelemetry.context import Context
from opentelemetry.trace import SpanContext, TraceFlags

from bench.sink_reader import running_sink
from galley.common.metrics.exposition import OPEN_METRICS, TEXT, Exposition
from galley.common.metrics.labels import GATEWAY
from galley.common.metrics.registry import Registry
from galley.common.tracing.light_spans import SpanScope
from galley.common.tracing.telemetry import Telemetry, start_telemetry
from galley.core import names
from galley.core.answer.answer import Answer, SessionSpec
from galley.core.sampling_params import SamplingParams
from galley.core.scheduler.messages import BatchInfo
from galley.core.scheduler.scheduler import Scheduler
from galley.core.session import events as ev
from galley.core.session.machine import Session, SessionLimits
from galley.core.session.ports import Replica
from galley.core.store import Ownership, StoredSession
from galley.pb.galley.v1 import galley_pb2 as pb
from services.draft import spans as draft
from services.draft.drafter import Proposed, ProposeJob
from services.draft.loop import Done
from services.gateway.clock import MonotonicClock
from services.gateway.telemetry.own_span import Begun
from services.gateway.telemetry.round_spans import TraceOptions
from services.gateway.telemetry.session_metrics import CountingStreamMeter, Sessions
from services.gateway.telemetry.spans import RequestTrace
from services.target import spans as target

_TRIES, _TIMES = 7, 2000
_SESSIONS, _STEPS = 16, 4
_CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0"
_SPEC = SessionSpec("0123456789abcdef" * 2, (1, 2, 3), SamplingParams(), max_position=99, vocab_size=99)
_DRAFT, _TARGET = Replica("127.0.0.1:40001", "a"), Replica("127.0.0.1:40002", "b")
_ROUND = ev.RoundEnded(
    position=100,
    started_ns=10**9,
    ended_ns=10**9 + 30_000_000,
    drafted=4,
    verified=4,
    accepted=2,
    confirmed=3,
    draft_wait_ns=123_456,
    exposed_draft_ns=1_234_567,
    verify_wait_ns=23_456_789,
    orchestration_ns=345_678,
    draft=ev.Timing(1_234, 3_456_789),
    target=ev.Timing(2_345_678, 20_345_678, 1_000_000),
    k=4,
    strategy="model",
    overlap="hit",
    batch_span=bytes(range(1, 25)),
    batch_sessions=_SESSIONS,
)


def cost_us(work: Callable[[], object], telemetry: Telemetry | None = None, times: int = _TIMES) -> float:
    """CPU of this process for one time."""
    best = float("inf")
    for _ in range(_TRIES):
        gc.collect()
        began = time.process_time()
        for _ in range(times):
            work()
        if telemetry is not None and telemetry.provider is not None:
            telemetry.provider.force_flush()
        best = min(best, time.process_time() - began)
    return best / times * 1e6


def of_gateway(telemetry: Telemetry, *, sampled: bool) -> dict[str, float]:
    """Of a round, a call of Propose and a commit."""
    request, clock = RequestTrace(), MonotonicClock()
    if (scope := telemetry.scope("gateway")) is not None:
        own = scope.request(Context(), "x", {names.FORCED: True} if sampled else {})
        offset_ns = time.time_ns() - clock.now_ns()
        request = RequestTrace(Begun(scope, TraceOptions(), own, None, clock, offset_ns, time.time_ns()))
        request.begin()
    session = Session(Answer(_SPEC, lambda _: ""), SessionLimits())
    request.opened(session, StoredSession(Ownership("s", 1, b"n"), "me", {}, 3, [1, 2, 3]), 0, None)

    def round_of() -> None:
        request.round_ended(_ROUND, _DRAFT, _TARGET)
        request.committed(200, 1_234_567)

    def commit() -> None:
        call = request.store_call("commit")
        if call is not None:
            call.end()

    def propose() -> None:
        request.call(names.PROPOSE, _DRAFT.address).end()

    parts = {"round": round_of, "propose": propose, "commit": commit}
    return {f"gateway: {name}": cost_us(work, telemetry) for name, work in parts.items()}


def of_draft(scope: SpanScope | None, telemetry: Telemetry, *, sampled: bool) -> dict[str, float]:
    """Of an item, and of a batch of steps that items share."""
    item = pb.ProposeItem(slice=_slice(0, sampled=sampled), k=4)
    job = ProposeJob(cast("Any", None), 4, "model")
    done = Done(Proposed(100, b"", (1, 2, 3, 4), (0.5,) * 4, 104), 1_234_567, 2_345_678, _SESSIONS)

    def propose() -> draft.ProposeSpan:
        span = draft.ProposeSpan(scope, item)
        span.asked(job)
        span.answered(job, done)
        span.end()
        return span

    shared = [span for span in (propose().span for _ in range(_SESSIONS)) if span is not None]
    batches = draft.BatchSpans(scope)

    def batch() -> None:
        for _ in range(_STEPS if shared else 0):
            batches.stepped(shared, 1_000_000, _SESSIONS, 1)
        batches.end()

    return {
        "draft: item": cost_us(propose, telemetry),
        "draft: batch": cost_us(batch, telemetry, _TIMES // 10),
    }


def of_target(scope: SpanScope | None, telemetry: Telemetry, *, sampled: bool) -> dict[str, float]:
    """Of an item, and of a pass of as many sessions as there are streams."""
    batches = target.BatchSpans(scope)
    for number in range(_SESSIONS):
        item = pb.VerifyItem(slice=_slice(number, sampled=sampled))
        batches.joins(number, target.VerifySpan(scope, item).span)
    facts = BatchInfo(tuple(range(_SESSIONS)), 80, 64, 0, 1000, _SESSIONS, (), ())

    class Under:
        under_way = facts

    def passed() -> None:
        batch = batches.begin(cast("Scheduler", Under))
        if batch is not None:
            batch.ran()
            batch.end()

    def verify() -> None:
        target.VerifySpan(scope, pb.VerifyItem(slice=_slice(0, sampled=sampled))).end()

    return {
        "target: item": cost_us(verify, telemetry),
        "target: pass": cost_us(passed, telemetry, _TIMES // 10),
    }


def of_metrics() -> dict[str, float]:
    """Of a round and its commit, and of a scrape of the sessions' metrics."""
    registry, written = Registry(GATEWAY), Exposition()
    meter = CountingStreamMeter(Sessions(registry, "model"), "")
    meter.traced(SpanContext(1, 2, is_remote=False, trace_flags=TraceFlags(1)))

    def count() -> None:
        meter.round(_ROUND)
        meter.committed(1_234_567, None)

    costs = {"metrics: round and commit": cost_us(count)}
    for name, accept in (("text", TEXT), ("OpenMetrics", OPEN_METRICS)):
        scrape = cost_us(lambda accept=accept: written.render(registry.read(), accept), None, 100)  # type: ignore[misc]
        costs[f"metrics: scrape as {name}"] = scrape
    return costs


def _slice(number: int, *, sampled: bool) -> pb.SessionSlice:
    return pb.SessionSlice(session_id=f"{number:032x}", traceparent=f"{_CALLER}{int(sampled)}")


async def main() -> None:
    """Print what each part costs: sampled, not sampled, and with traces off."""
    os.environ |= {"OTEL_TRACES_SAMPLER": "parentbased_always_off", "OTEL_BSP_SCHEDULE_DELAY": "1000"}
    async with running_sink() as sink:
        os.environ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] = f"http://{sink.address}"
        on = start_telemetry("galley-bench", as_global=False)
        for name, telemetry, sampled in (
            ("sampled", on, True),
            ("not sampled", on, False),
            ("off", Telemetry(), False),
        ):
            costs = of_gateway(telemetry, sampled=sampled)
            costs |= of_draft(telemetry.scope("draft"), telemetry, sampled=sampled)
            costs |= of_target(telemetry.scope("target"), telemetry, sampled=sampled)
            _tell(name, costs)
        await asyncio.to_thread(on.shutdown)
    _tell("metrics", of_metrics())


def _tell(name: str, costs: dict[str, float]) -> None:
    print(name)
    for part, us in costs.items():
        print(f"  {part:<32}{us:8.2f} us")


if __name__ == "__main__":
    asyncio.run(main())
