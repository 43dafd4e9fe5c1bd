"""How many replicas a load needs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from services.target.ray.autoscaling import replicas_for, scale_targets


@pytest.mark.parametrize(
    ("loads", "running", "expected"),
    [
        ([], 2, 2),
        ([(0, 0.9)], 1, 1),
        ([(0, 0.9), (0, 0.8)], 2, 1),
        ([(30, 0.9), (0, 0.9)], 2, 3),
        ([(0, 0.02), (1, 0.1)], 2, 3),
        ([(3, 0.5), (2, 0.4)], 2, 2),
        ([(0, 0.4), (0, 0.5)], 2, 2),
    ],
)
def test_replicas_for(loads: list[tuple[float, float]], running: int, expected: int) -> None:
    assert replicas_for(loads, running) == expected


def test_serve_is_answered_from_what_replicas_report() -> None:
    metrics = {"queue_depth": {"a": 20.0, "b": 10.0, "new": 0.0}, "kv_free_share": {"a": 0.5, "b": 0.5}}
    two = SimpleNamespace(current_num_replicas=2, target_num_replicas=2)
    assert scale_targets(SimpleNamespace(**vars(two), aggregated_metrics=metrics)) == (3, {})
    assert scale_targets(SimpleNamespace(**vars(two), aggregated_metrics=None)) == (2, {})


def test_a_replica_that_is_still_loading_is_waited_for() -> None:
    metrics = {"queue_depth": {"a": 20.0}, "kv_free_share": {"a": 0.5}}
    loading = SimpleNamespace(current_num_replicas=1, target_num_replicas=2, aggregated_metrics=metrics)
    assert scale_targets(loading) == (2, {})
