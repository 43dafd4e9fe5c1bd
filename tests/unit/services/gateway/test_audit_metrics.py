"""What is counted of audits."""

from __future__ import annotations

import pytest

from galley.common.metrics import catalogue
from galley.common.metrics.labels import GATEWAY
from galley.common.metrics.registry import Registry
from galley.core.audit import AuditReport, Verdict
from services.gateway.telemetry.component_metrics import AuditMetrics
from tests.fakes.readings import number, total


@pytest.fixture
def registry() -> Registry:
    return Registry(GATEWAY)


@pytest.fixture
def metrics(registry: Registry) -> AuditMetrics:
    return AuditMetrics(registry)


def tokens(registry: Registry) -> dict[tuple[str, str], float]:
    labels = [(build, result) for build in ("deterministic", "other") for result in ("same", "differs")]
    return {label: number(registry, catalogue.AUDIT_TOKENS, *label) for label in labels}


def test_tokens_are_counted_by_build_and_result(registry: Registry, metrics: AuditMetrics) -> None:
    metrics.audited(AuditReport("a", Verdict.SAME, 10, 10, 0, deterministic=True), 0)
    metrics.audited(AuditReport("b", Verdict.DIFFERS, 10, 8, 3, deterministic=True), 0)
    metrics.audited(AuditReport("c", Verdict.DIFFERS, 5, 5, 1), 0)
    assert tokens(registry) == {
        ("deterministic", "same"): 15,
        ("deterministic", "differs"): 3,
        ("other", "same"): 4,
        ("other", "differs"): 1,
    }


@pytest.mark.parametrize("verdict", Verdict)
def test_each_audit_is_counted_by_its_verdict(
    registry: Registry, metrics: AuditMetrics, verdict: Verdict
) -> None:
    metrics.audited(AuditReport("a", verdict), 0)
    assert number(registry, catalogue.AUDIT_SESSIONS, verdict.value) == 1
    assert total(registry, catalogue.AUDIT_SESSIONS) == 1


def test_the_targets_time_is_counted_in_seconds(registry: Registry, metrics: AuditMetrics) -> None:
    for _ in "12":
        metrics.audited(AuditReport("a", Verdict.SAME), 250_000_000)
    assert number(registry, catalogue.AUDIT_TIME) == 0.5


def test_waiting_sessions_are_read_when_metrics_are(registry: Registry, metrics: AuditMetrics) -> None:
    assert number(registry, catalogue.AUDIT_WAITING) == 0
    waiting = ["a"]
    metrics.observe_waiting(lambda: len(waiting))
    assert number(registry, catalogue.AUDIT_WAITING) == 1
    waiting.append("b")
    assert number(registry, catalogue.AUDIT_WAITING) == 2
