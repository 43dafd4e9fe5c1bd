"""Metrics of the parts that work beside the sessions: audits, grammars and the versions of drafts."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Literal, TypeAlias

from galley.common.metrics import catalogue
from galley.common.metrics.labels import NO_VERSION
from galley.common.metrics.registry import Observed, Registry
from galley.core.audit import AuditReport
from galley.core.versions.split import Split

Skipped: TypeAlias = Literal["expired", "backlog", "long", "failed", "drained"]
Ending: TypeAlias = Literal["promoted", "rolled_back", "no_gain"]


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


class VersionMetrics:
    def __init__(self, registry: Registry) -> None:
        self._sessions = registry.count(catalogue.DRAFT_VERSION_SESSIONS)
        self._output = registry.count(catalogue.DRAFT_VERSION_OUTPUT_TOKENS)
        self._accepted = registry.count(catalogue.DRAFT_VERSION_ACCEPTED_TOKENS)
        self._decisions = registry.count(catalogue.DRAFT_VERSION_DECISIONS)
        self._split: Callable[[], Split] = Split
        registry.observe(catalogue.DRAFT_VERSION_SHARE, lambda: _shares(self._split()))

    def finished(self, version: str, output_tokens: int, accepted: int) -> None:
        """Count a session that was given `version`; empty for one that was given none by name."""
        name = version or NO_VERSION
        self._sessions.at(name).value += 1
        self._output.at(name).value += output_tokens
        self._accepted.at(name).value += accepted

    def decided(self, ending: Ending) -> None:
        """Count a trial that this gateway ended by rule."""
        self._decisions.at(ending).value += 1

    def observe_split(self, split: Callable[[], Split]) -> None:
        """Export the shares of the split that `split` returns."""
        self._split = split


def _shares(split: Split) -> Observed:
    if split.canary:
        yield (split.canary,), split.share
    if split.canary or split.stable:
        yield (split.stable or NO_VERSION,), 1.0 - (split.share if split.canary else 0.0)


def count_compiled(registry: Registry) -> Callable[[int, bool], None]:
    """Return what counts a compiled or refused grammar; several threads may call it."""
    durations = registry.distribute(catalogue.GRAMMAR_COMPILE_DURATION)
    by_refusal = {False: durations.at("ok"), True: durations.at("refused")}
    lock = Lock()

    def count(took_ns: int, refused: bool) -> None:
        with lock:
            by_refusal[refused].observe(took_ns / 1e9)

    return count
