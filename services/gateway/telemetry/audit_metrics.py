"""Metrics of audits."""

from __future__ import annotations

from collections.abc import Callable

from galley.common.metrics import catalogue
from galley.common.metrics.registry import Registry
from galley.core.audit import AuditReport


class AuditMetrics:
    def __init__(self, registry: Registry) -> None:
        self._tokens = registry.count(catalogue.AUDIT_TOKENS)
        self._sessions = registry.count(catalogue.AUDIT_SESSIONS)
        self._time = registry.count(catalogue.AUDIT_TIME).at()
        self._waiting: Callable[[], int] = int
        registry.observe(catalogue.AUDIT_WAITING, lambda: [((), self._waiting())])

    def audited(self, report: AuditReport, compute_ns: int) -> None:
        """Count an audit that took `compute_ns` of a target's time."""
        build = "deterministic" if report.deterministic else "other"
        self._tokens.at(build, "same").value += report.compared - report.differing
        self._tokens.at(build, "differs").value += report.differing
        self._sessions.at(report.verdict.value).value += 1
        self._time.value += compute_ns / 1e9

    def observe_waiting(self, waiting: Callable[[], int]) -> None:
        """Export what `waiting` returns as the number of sessions that wait for their audit; 0 until then."""
        self._waiting = waiting
