"""The table of metrics, what is counted by it, and how Prometheus reads it."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_open_metrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from galley.common.metrics import catalogue
from galley.common.metrics.labels import SERVICES, STRATEGY, WORKLOAD
from galley.common.metrics.metric import OTHER, Kind, Metric
from galley.common.metrics.registry import Bound, Count, Distribution, Registry, Series, span_ref
from galley.common.metrics.scrape import OPEN_METRICS, TEXT, render
from galley.version import __version__
from tests.fakes.readings import count, histogram, number

PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
TRACE, SPAN = 0xABC, 0xDEF


def span(*, sampled: bool = True) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
    return NonRecordingSpan(SpanContext(TRACE, SPAN, is_remote=False, trace_flags=flags)).get_span_context()


@pytest.mark.parametrize("metric", catalogue.METRICS, ids=lambda metric: metric.name)
def test_each_metric_is_fit_for_both_worlds(metric: Metric) -> None:
    assert re.fullmatch(r"(galley|gen_ai|process)(\.[a-z][a-z_]*)+", metric.name)
    assert all(re.fullmatch(r"[a-z_][a-z0-9_]*", name) for name in metric.series)
    assert all(re.fullmatch(r"[a-z_][a-z0-9_]*", label.prometheus) for label in metric.labels)
    assert metric.description.endswith(".")
    assert metric.services
    assert set(metric.services) <= set(SERVICES)
    assert all(label.values or 0 < label.most <= 64 for label in metric.labels)
    assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
    assert all(below < above for below, above in pairwise(metric.buckets))
    assert metric.kind is Kind.HISTOGRAM or not metric.exemplars


def test_no_two_metrics_share_a_name() -> None:
    for names in (
        [metric.name for metric in catalogue.METRICS],
        [name for metric in catalogue.METRICS for name in metric.series],
    ):
        assert len(names) == len(set(names))


def test_the_semantic_conventions_own_buckets_and_names() -> None:
    first, later, whole = (
        catalogue.TIME_TO_FIRST_TOKEN,
        catalogue.TIME_PER_OUTPUT_TOKEN,
        catalogue.REQUEST_DURATION,
    )
    assert first.prometheus == "gen_ai_server_time_to_first_token_seconds"
    assert later.series[0] == "gen_ai_server_time_per_output_token_seconds_bucket"
    assert whole.buckets == tuple(round(0.01 * 2**i, 2) for i in range(14))
    assert (len(first.buckets), first.buckets[0], first.buckets[-1]) == (16, 0.001, 10.0)
    assert (len(later.buckets), later.buckets[0], later.buckets[-1]) == (13, 0.01, 2.5)


def test_a_histograms_bounds_belong_to_the_buckets_below_them() -> None:
    cell = Distribution((1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 2.1):
        cell.observe(value)
    read = cell.read()
    assert read.counts == (2, 2, 1)
    assert read.total == pytest.approx(6.6)
    assert not read.exemplars


def test_an_exemplar_is_the_last_of_its_bucket_that_is_sampled() -> None:
    cell = Distribution((1.0,))
    cell.observe(0.1, span_ref(span()))
    cell.observe(0.2, span_ref(span()))
    cell.observe(0.3, span_ref(span(sampled=False)))
    cell.observe(5.0)
    exemplars = cell.read().exemplars
    assert {bucket: (it.value, it.span) for bucket, it in exemplars.items()} == {0: (0.2, (TRACE, SPAN))}


def test_open_label_keeps_the_first_values_and_folds_the_rest() -> None:
    bound = Bound(WORKLOAD)
    names = [f"w{number}" for number in range(2 * WORKLOAD.most)]
    fitted = [bound.fit(name) for name in names]
    assert fitted == names[: WORKLOAD.most] + [OTHER] * WORKLOAD.most
    assert bound.fit(names[0]) == names[0]


def test_a_closed_label_takes_no_other_value() -> None:
    assert Bound(STRATEGY).fit("a draft's invention") == OTHER
    (overlap,) = catalogue.OVERLAPS.labels
    with pytest.raises(ValueError, match="must be one of hit, miss, got 'perhaps'"):
        Bound(overlap).fit("perhaps")


def test_series_of_known_labels_are_there_from_the_start() -> None:
    series = Series(catalogue.OVERLAPS, [Bound(label) for label in catalogue.OVERLAPS.labels], Count)
    assert [values for values, _ in series.cells()] == [("hit",), ("miss",)]
    assert series.at("hit") is series.at("hit")


def test_collected_values_are_read_at_each_scrape_and_bounded() -> None:
    registry, there = Registry("gateway"), ["a:1"]
    registry.observe(
        catalogue.BREAKER_STATE, lambda: [(("draft", it), index) for index, it in enumerate(there)]
    )
    assert number(registry, catalogue.BREAKER_STATE, "draft", "a:1") == 0
    there[:] = [f"b:{port}" for port in range(100)]
    [reading] = [reading for reading in registry.read() if reading.metric is catalogue.BREAKER_STATE]
    assert len(reading.points) == 65
    assert number(registry, catalogue.BREAKER_STATE, "draft", OTHER) == 99


def test_a_metric_is_added_once_and_by_its_own_service() -> None:
    registry = Registry("gateway")
    registry.count(catalogue.OVERLAPS)
    for metric in (catalogue.OVERLAPS, catalogue.PREEMPTIONS):
        with pytest.raises(ValueError, match=metric.name):
            registry.count(metric)


def a_registry() -> Registry:
    registry = Registry("gateway")
    registry.count(catalogue.OVERLAPS).at("hit").value += 3
    registry.distribute(catalogue.ROUND_DURATION).at().observe(0.012, span_ref(span()))
    registry.count(catalogue.PLAIN_TIME).at('a "quoted"\nname\\').value += 1.5
    registry.observe(catalogue.SESSIONS_OPEN, lambda: [((), 7)])
    return registry


@pytest.mark.parametrize("accept", ["", "*/*", "text/plain;version=0.0.4"])
async def test_text_is_what_prometheus_reads(accept: str) -> None:
    body, kind = await render(a_registry().read(), accept)
    assert kind == TEXT
    samples = {
        (sample.name, *sample.labels.items()): sample.value
        for family in read_text(body.decode())
        for sample in family.samples
    }
    assert samples["galley_overlap_total", ("result", "hit")] == 3
    assert samples["galley_overlap_total", ("result", "miss")] == 0
    assert samples["galley_sessions_open",] == 7
    assert samples["galley_round_duration_seconds_count",] == 1
    assert samples["galley_round_duration_seconds_sum",] == 0.012
    assert samples["galley_round_duration_seconds_bucket", ("le", "0.01")] == 0
    assert samples["galley_round_duration_seconds_bucket", ("le", "0.02")] == 1
    assert samples["galley_round_duration_seconds_bucket", ("le", "+Inf")] == 1
    assert samples["galley_plain_time_seconds_total", ("workload", 'a "quoted"\nname\\')] == 1.5
    assert samples["galley_build_info", ("service", "gateway"), ("version", __version__)] == 1
    assert "# {" not in body.decode()


async def test_open_metrics_names_the_traces() -> None:
    body, kind = await render(a_registry().read(), PROMETHEUS)
    assert kind == OPEN_METRICS
    families: dict[str, Family] = {
        family.name: family
        for family in read_open_metrics(body.decode())  # type: ignore[no-untyped-call]  # is untyped
    }
    assert families["galley_plain_time_seconds"].unit == "seconds"
    assert families["galley_build"].type == "info"
    exemplars = [it.exemplar for it in families["galley_round_duration_seconds"].samples if it.exemplar]
    [exemplar] = exemplars
    assert exemplar.labels == {"trace_id": f"{TRACE:032x}", "span_id": f"{SPAN:016x}"}
    assert exemplar.value == 0.012


async def test_a_series_that_has_gone_is_written_no_more() -> None:
    registry, there = Registry("gateway"), ["a:1"]
    registry.observe(catalogue.BREAKER_STATE, lambda: [(("draft", it), 0) for it in there])
    for there[:] in (["a:1"], ["b:2"], ["a:1", "b:2"], []):
        body, _ = await render(registry.read(), "")
        reported = re.findall(r'replica="([^"]*)"', body.decode())
        assert reported == there


def test_readings_of_tests_agree_with_the_cells() -> None:
    registry = a_registry()
    assert count(registry, catalogue.ROUND_DURATION) == 1
    assert histogram(registry, catalogue.ROUND_DURATION).total == 0.012
