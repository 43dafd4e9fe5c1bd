"""Serve metrics to Prometheus: its text, or OpenMetrics with exemplars if a scrape accepts it.

GET and HEAD /metrics are served, one request per connection. Connections, request size and time are bounded.
The server runs in the event loop that counts, because gauges read that loop's objects;
`prometheus_client.start_http_server` would read them from threads, without these bounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import accumulate, chain

from prometheus_client import exposition
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics import exposition as openmetrics_exposition
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar as NamedExemplar

from galley.common.metrics.metric import Kind, LabelValues
from galley.common.metrics.registry import Distributed, Exemplar, Reading, Registry
from galley.common.sockets import CannotBind, bind_socket, socket_address

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_EOF = b"# EOF\n"
"""The end of OpenMetrics."""

PATH = "/metrics"
MAX_REQUEST_BYTES = 8192
MAX_CONNECTIONS = 8
TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: str
    accept: str


class _Refused(Exception):
    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


class ScrapeServer:
    """The server of a registry's metrics; use it in the event loop that counts."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()

    async def start(self, host: str, port: int) -> str:
        """Start serving; return the address (host:port). Raise CannotBind."""
        try:
            bound = bind_socket(host, port)
        except CannotBind as error:
            raise CannotBind(f"metrics: {error}") from error
        self._server = await asyncio.start_server(self._serve, sock=bound, limit=MAX_REQUEST_BYTES)
        return socket_address(bound)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self._open) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._open.add(task)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._exchange(reader, writer)
        except (TimeoutError, OSError):
            pass  # the client is slow or has gone
        finally:
            self._open.discard(task)
            writer.transport.abort()  # does not wait for unsent data

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.set_write_buffer_limits(high=0)  # so that `drain` waits until all is sent
        try:
            request = await _request(reader)
            async with self._turn:
                writer.write(await self._answer(request))
        except _Refused as refused:
            writer.write(_response(refused.status, b"", "text/plain", {"Allow": "GET, HEAD"}))
        await writer.drain()
        writer.close()

    async def _answer(self, request: _Request) -> bytes:
        if request.path != PATH:
            raise _Refused(HTTPStatus.NOT_FOUND)
        if request.method not in {"GET", "HEAD"}:
            raise _Refused(HTTPStatus.METHOD_NOT_ALLOWED)
        body, kind = await render(self._registry.read(), request.accept)
        response = _response(HTTPStatus.OK, body, kind)
        return response if request.method == "GET" else response[: len(response) - len(body)]


async def _request(reader: asyncio.StreamReader) -> _Request:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise _Refused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE) from None
    except asyncio.IncompleteReadError as error:
        raise ConnectionResetError("the request broke off") from error
    first, *rest = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise _Refused(HTTPStatus.BAD_REQUEST)
    fields = {name.strip().lower(): value for name, _, value in (line.partition(":") for line in rest)}
    return _Request(words[0], words[1].partition("?")[0], fields.get("accept", ""))


def _response(
    status: HTTPStatus, body: bytes, content_type: str, more: dict[str, str] | None = None
) -> bytes:
    fields = {
        "Content-Type": content_type,
        "Content-Length": str(len(body)),
        "Connection": "close",
        **(more or {}),
    }
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{name}: {it}" for name, it in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


# ------------------------------------------------------------------------------------ exposition --


async def render(readings: Sequence[Reading], accept: str) -> tuple[bytes, str]:
    """Return the body and its type, as the Accept header asks; others get a turn after each metric."""
    is_open = any(kind.split(";")[0].strip() == "application/openmetrics-text" for kind in accept.split(","))
    write = openmetrics_exposition.generate_latest if is_open else exposition.generate_latest
    parts = []
    for reading in readings:
        parts.append(write(_Collected(reading), openmetrics_exposition.ALLOWUTF8).removesuffix(_EOF))
        await asyncio.sleep(0)
    return b"".join(parts) + (_EOF if is_open else b""), OPEN_METRICS if is_open else TEXT


class _Collected(Collector):
    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def collect(self) -> Iterable[Family]:
        yield _family(self._reading)


def _family(reading: Reading) -> Family:
    metric = reading.metric
    about = metric.prometheus, metric.description
    labels = [label.prometheus for label in metric.labels]
    match metric.kind:
        case Kind.COUNTER:
            counter = CounterMetricFamily(*about, labels=labels, unit=metric.prometheus_unit)
            for values, value in _numbers(reading):
                counter.add_metric(values, value)
            return counter
        case Kind.GAUGE:
            gauge = GaugeMetricFamily(*about, labels=labels, unit=metric.prometheus_unit)
            for values, value in _numbers(reading):
                gauge.add_metric(values, value)
            return gauge
        case Kind.INFO:
            info = InfoMetricFamily(*about)
            for values, _ in reading.points:
                info.add_metric((), dict(zip(labels, values, strict=True)))
            return info
        case Kind.HISTOGRAM:
            histogram = HistogramMetricFamily(*about, labels=labels, unit=metric.prometheus_unit)
            for values, read in reading.points:
                if isinstance(read, Distributed):
                    histogram.add_metric(values, list(_buckets(read)), read.total)
            return histogram


def _numbers(reading: Reading) -> Iterator[tuple[LabelValues, float]]:
    for values, value in reading.points:
        if not isinstance(value, Distributed):
            yield values, value


def _buckets(read: Distributed) -> Iterator[tuple[str, float] | tuple[str, float, NamedExemplar]]:
    names = chain(map(str, read.bounds), ["+Inf"])
    for index, (name, below) in enumerate(zip(names, accumulate(read.counts), strict=True)):
        exemplar = read.exemplars.get(index)
        yield (name, below) if exemplar is None else (name, below, _named(exemplar))


def _named(exemplar: Exemplar) -> NamedExemplar:
    trace_id, span_id = exemplar.span
    labels = {"trace_id": f"{trace_id:032x}", "span_id": f"{span_id:016x}"}
    return NamedExemplar(labels, exemplar.value, exemplar.at_s)
