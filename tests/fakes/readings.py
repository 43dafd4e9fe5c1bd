"""The values of a metrics registry, for tests."""

from __future__ import annotations

from galley.common.metrics.metric import Metric
from galley.common.metrics.registry import Distributed, Point, Registry


def _point(registry: Registry, metric: Metric, *labels: str) -> Point:
    [reading] = [reading for reading in registry.read() if reading.metric is metric]
    [point] = [point for point in reading.points if point[0] == labels]
    return point


def number(registry: Registry, metric: Metric, *labels: str) -> float:
    value = _point(registry, metric, *labels)[1]
    assert not isinstance(value, Distributed)
    return value


def total(registry: Registry, metric: Metric) -> float:
    [reading] = [reading for reading in registry.read() if reading.metric is metric]
    return sum(value for _, value in reading.points if not isinstance(value, Distributed))


def histogram(registry: Registry, metric: Metric, *labels: str) -> Distributed:
    value = _point(registry, metric, *labels)[1]
    assert isinstance(value, Distributed)
    return value


def count(registry: Registry, metric: Metric, *labels: str) -> int:
    return sum(histogram(registry, metric, *labels).counts)
