"""Metrics of the grammars that requests bring."""

from __future__ import annotations

from threading import Lock

from galley.common.metrics import catalogue
from galley.common.metrics.registry import Registry


class GrammarMetrics:
    """Count compiled and refused grammars; several threads may do so."""

    def __init__(self, registry: Registry) -> None:
        durations = registry.distribute(catalogue.GRAMMAR_COMPILE_DURATION)
        self._durations = {False: durations.at("ok"), True: durations.at("refused")}
        self._lock = Lock()

    def count(self, took_ns: int, refused: bool) -> None:
        with self._lock:
            self._durations[refused].observe(took_ns / 1e9)
