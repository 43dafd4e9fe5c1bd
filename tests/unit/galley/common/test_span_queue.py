"""Spans wait in a bounded queue, and leave in a thread that nothing of a stream waits for."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from opentelemetry.instrumentation.utils import is_instrumentation_enabled
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from galley.common.tracing.span_queue import QueueLimits, SpanQueue
from galley.common.tracing.telemetry import telemetry_to
from tests.fakes.waiting import PATIENCE_S

FOR_EVER_S = 3600.0


class Taking(SpanExporter):
    """Keeps the names of what it is given; each request waits until it may go."""

    def __init__(self) -> None:
        self.requests: list[list[str]] = []
        self.failure: Exception | None = None
        self.may_go = threading.Event()
        self.may_go.set()
        self.asked = threading.Semaphore(0)
        self.instrumented: set[bool] = set()
        self.shut_down = 0

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        self.instrumented.add(is_instrumentation_enabled())
        self.asked.release()
        self.may_go.wait(PATIENCE_S)
        if self.failure is not None:
            raise self.failure
        self.requests.append([span.name for span in spans])
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.shut_down += 1

    @property
    def names(self) -> list[str]:
        return [name for request in self.requests for name in request]

    def has_been_asked(self) -> bool:
        return self.asked.acquire(timeout=PATIENCE_S)


@pytest.fixture
def taking() -> Iterator[Taking]:
    taking = Taking()
    yield taking
    taking.may_go.set()


class Spans:
    """A queue, and spans that are put into it."""

    def __init__(self, exporter: SpanExporter, most: int, at_once: int, delay_s: float = FOR_EVER_S) -> None:
        self.queue = SpanQueue(exporter, QueueLimits(most, at_once, delay_s))
        self.telemetry = telemetry_to(self.queue, "test")
        self._scope = self.telemetry.scope("test")

    def put(self, *names: object) -> None:
        assert self._scope is not None
        for name in names:
            self._scope.root(str(name), 1).end(2)


def test_a_request_goes_as_soon_as_there_is_enough_for_it(taking: Taking) -> None:
    spans = Spans(taking, most=100, at_once=3)
    spans.put("a", "b")
    assert taking.requests == []
    spans.put("c")
    assert taking.has_been_asked()
    spans.queue.shutdown()
    assert taking.requests == [["a", "b", "c"]]
    assert taking.instrumented == {False}, "what it sends itself is no trace"


def test_few_spans_wait_no_longer_than_they_are_to(taking: Taking) -> None:
    spans = Spans(taking, most=100, at_once=50, delay_s=0.001)
    spans.put("a")
    assert taking.has_been_asked()
    spans.queue.shutdown()
    assert taking.requests == [["a"]]


def test_all_that_is_left_is_sent_in_the_end_and_nothing_after_it(taking: Taking) -> None:
    spans = Spans(taking, most=100, at_once=4)
    spans.put(*range(3))
    with spans.telemetry.tracer("the sdk's own").start_as_current_span("x"):
        pass
    spans.telemetry.shutdown()
    spans.telemetry.shutdown()
    assert taking.requests == [["0", "1", "2", "x"]]
    assert taking.shut_down == 1
    spans.put("late")
    assert len(taking.requests) == 1


def test_a_flush_sends_what_there_is(taking: Taking) -> None:
    spans = Spans(taking, most=100, at_once=2)
    taking.may_go.clear()
    spans.put(*range(2))
    assert taking.has_been_asked()
    spans.put(2)
    taking.may_go.set()
    assert spans.queue.force_flush()
    assert taking.names == ["0", "1", "2"]
    spans.queue.shutdown()


def test_while_nobody_takes_them_the_oldest_go_and_nobody_waits(
    taking: Taking, caplog: pytest.LogCaptureFixture
) -> None:
    spans = Spans(taking, most=4, at_once=2)
    taking.may_go.clear()
    spans.put("a", "b")
    assert taking.has_been_asked()
    spans.put(*range(10))
    taking.may_go.set()
    spans.queue.shutdown()
    assert taking.names == ["a", "b", "6", "7", "8", "9"]
    assert caplog.messages == ["6 spans were dropped: no more than 4 wait"]


def test_an_exporter_that_raises_is_logged_and_asked_again(
    taking: Taking, caplog: pytest.LogCaptureFixture
) -> None:
    spans = Spans(taking, most=100, at_once=1)
    taking.failure = RuntimeError("broken")
    spans.put("a")
    spans.queue.force_flush()
    taking.failure = None
    spans.put("b")
    spans.queue.shutdown()
    assert taking.requests == [["b"]]
    assert "spans cannot be exported" in caplog.messages


def test_limits_are_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_QUEUE_SIZE", "MAX_EXPORT_BATCH_SIZE", "SCHEDULE_DELAY"):
        monkeypatch.delenv(f"OTEL_BSP_{name}", raising=False)
    assert QueueLimits.told() == QueueLimits(8192, 1024, 5.0)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "250")
    assert QueueLimits.told() == QueueLimits(100, 100, 0.25)
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "7")
    assert QueueLimits.told() == QueueLimits(100, 7, 0.25)


@pytest.mark.parametrize("wrong", ["0", "-1", "many", "inf", "nan"])
def test_a_limit_that_cannot_be_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", wrong)
    assert QueueLimits.told().most == 8192
    assert caplog.messages == [f"OTEL_BSP_MAX_QUEUE_SIZE must be a number above 0, is {wrong}; taken as 8192"]
