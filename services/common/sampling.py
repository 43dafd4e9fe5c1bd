"""Which spans are kept: as `OTEL_TRACES_SAMPLER` says, but for what was asked for or must not be torn.

Imports the SDK: to be imported where traces are on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult

from services.core import trace_names as names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.context import Context
    from opentelemetry.trace import Link, SpanKind, TraceState
    from opentelemetry.util.types import Attributes

_BATCHES = frozenset({names.VERIFY_BATCH, names.DRAFT_BATCH})


class GalleySampler(Sampler):
    """`inner`, unless the request was forced, or what a span links to is kept.

    A batch belongs to no request: as a root it is kept if one that it serves is, and only then.
    """

    def __init__(self, inner: Sampler) -> None:
        self._inner = inner

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """See the class."""
        parent = trace.get_current_span(parent_context).get_span_context()
        forced = attributes is not None and bool(attributes.get(names.FORCED))
        if forced or any(link.context.trace_flags.sampled for link in links or ()):
            return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes, parent.trace_state)
        if name in _BATCHES and not parent.is_valid:
            return SamplingResult(Decision.DROP)
        return self._inner.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)

    def get_description(self) -> str:
        """For people."""
        return f"GalleySampler({self._inner.get_description()})"
