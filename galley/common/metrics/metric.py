"""What a metric is: its names here and in Prometheus, its unit, and how many series it can come to."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

OTHER = "other"
"""The value of a label that stands for all values beyond its bound."""

LabelValues: TypeAlias = tuple[str, ...]
_UNITS = {"s": "seconds"}


class Kind(enum.Enum):
    """How numbers of a metric are to be read."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


_SUFFIXES = {
    Kind.COUNTER: ("_total",),
    Kind.GAUGE: ("",),
    Kind.HISTOGRAM: ("_bucket", "_sum", "_count"),
    Kind.INFO: ("_info",),
}


@dataclass(frozen=True, slots=True)
class Label:
    """`values` are all that it can have; where these are not known before, at most `most`, then OTHER."""

    name: str
    description: str
    values: tuple[str, ...] = ()
    most: int = 0

    @property
    def prometheus(self) -> str:
        """Its name there."""
        return self.name.replace(".", "_")

    @property
    def bound(self) -> str:
        """In words."""
        if not self.values:
            return f"at most {self.most}, then `{OTHER}`"
        return ", ".join(value or "(empty)" for value in self.values)


@dataclass(frozen=True, slots=True)
class Metric:
    """`services` give it. `unit` is as UCUM writes it; `buckets` are upper bounds, in that unit.

    `initial` are the series that are there from the start, at zero; None: all, if each label's values are
    known. With `exemplars`, a bucket names a trace.
    """

    name: str
    kind: Kind
    unit: str
    description: str
    services: tuple[str, ...]
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    initial: tuple[LabelValues, ...] | None = None
    exemplars: bool = False

    @property
    def prometheus_unit(self) -> str:
        """Empty for what is merely counted."""
        return _UNITS.get(self.unit, "")

    @property
    def prometheus(self) -> str:
        """The name of its family there: as the type line of OpenMetrics has it."""
        name, unit = self.name.replace(".", "_"), self.prometheus_unit
        return f"{name}_{unit}" if unit and not name.endswith(f"_{unit}") else name

    @property
    def series(self) -> tuple[str, ...]:
        """The names that queries use."""
        return tuple(self.prometheus + suffix for suffix in _SUFFIXES[self.kind])

    @property
    def at_start(self) -> tuple[LabelValues, ...]:
        """The label values of the series that are there before anything has happened."""
        if self.initial is not None:
            return self.initial
        if all(label.values for label in self.labels):
            return tuple(product(*(label.values for label in self.labels)))
        return ()
