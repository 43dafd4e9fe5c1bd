"""Definition of a metric: names in OpenTelemetry and Prometheus, unit, labels and bounds."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from itertools import product
from typing import TypeAlias

OTHER = "other"
"""Label value that stands for all values beyond the label's bound."""

LabelValues: TypeAlias = tuple[str, ...]
_UNITS = {"s": "seconds", "By": "bytes"}


class Kind(enum.Enum):
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
    """A label. Without fixed `values` it keeps the first `most` values and replaces others by OTHER.

    With `keeps_latest` it keeps those that were used last; the series of others end.
    """

    name: str
    description: str
    values: tuple[str, ...] = ()
    most: int = 0
    keeps_latest: bool = False

    @property
    def prometheus(self) -> str:
        return self.name.replace(".", "_")

    @property
    def bound(self) -> str:
        """Return the possible values, for the table of metrics."""
        if not self.values:
            return f"the latest {self.most}" if self.keeps_latest else f"at most {self.most}, then `{OTHER}`"
        return ", ".join(value or "(empty)" for value in self.values)


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of `services`. `unit` is in UCUM; `buckets` are upper bounds in that unit.

    `initial` are the series that exist from the start, at zero; None means all, if all labels have fixed
    values. With `exemplars`, buckets link to traces.
    """

    name: str
    unit: str
    description: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    initial: tuple[LabelValues, ...] | None = None
    exemplars: bool = False
    kind: Kind = field(kw_only=True)
    services: tuple[str, ...] = field(kw_only=True)

    @property
    def prometheus_unit(self) -> str:
        """Return the unit's name, or an empty string for counts."""
        return _UNITS.get(self.unit, "")

    @property
    def prometheus(self) -> str:
        """Return the family name in Prometheus, as in the TYPE line of OpenMetrics."""
        name, unit = self.name.replace(".", "_"), self.prometheus_unit
        return f"{name}_{unit}" if unit and not name.endswith(f"_{unit}") else name

    @property
    def series(self) -> tuple[str, ...]:
        return tuple(self.prometheus + suffix for suffix in _SUFFIXES[self.kind])

    @property
    def at_start(self) -> tuple[LabelValues, ...]:
        """Return the label values of the series that exist from the start."""
        if self.initial is not None:
            return self.initial
        if all(label.values for label in self.labels):
            return tuple(product(*(label.values for label in self.labels)))
        return ()
