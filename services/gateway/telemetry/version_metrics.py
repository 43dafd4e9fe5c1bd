"""Metrics of the versions of drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from galley.common.metrics import catalogue
from galley.common.metrics.labels import NO_VERSION
from galley.common.metrics.registry import Observed, Registry
from galley.core.versions.split import Split

Ending: TypeAlias = Literal["promoted", "rolled_back", "no_gain"]


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
