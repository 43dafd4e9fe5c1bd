"""Metrics of audits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from galley.common.metrics import catalogue
from galley.common.metrics.registry import Registry
from galley.core.audit import AuditReport

Skipped: TypeAlias = Literal["expired", "backlog", "long", "failed", "drained"]


class AuditMetrics:
    def __init__(self, registry: Registry) -> None:
        self._tokens = registry.count(catalogue.AUDIT_TOKENS)
        self._sessions = registry.count(catalogue.AUDIT_SESSIONS)
        self._skipped = registry.count(catalogue.AUDIT_SKIPPED)
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

    def skipped(self, reason: Skipped, sessions: int) -> None:
        """Count drawn sessions that are not audited, or not to their end."""
        self._skipped.at(reason).value += sessions

    def observe_waiting(self, waiting: Callable[[], int]) -> None:
        """Export what `waiting` returns as the number of sessions that wait for their audit; 0 until then."""
        self._waiting = waiting
