"""Which requests are traced: as `OTEL_TRACES_SAMPLER` says, but for those that were forced.

Imports the SDK: to be imported where traces are on.
"""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.util.types import Attributes

from galley.core import names


class GalleySampler(Sampler):
    """`inner`, unless the request was forced."""

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
        if attributes is not None and attributes.get(names.FORCED):
            parent = trace.get_current_span(parent_context).get_span_context()
            return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes, parent.trace_state)
        return self._inner.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)

    def get_description(self) -> str:
        """For people."""
        return f"GalleySampler({self._inner.get_description()})"


def follows_sampled_parents(sampler: Sampler) -> bool:
    """Whether it keeps whatever is beneath a sampled span of another process, without being asked.

    So do those that `OTEL_TRACES_SAMPLER` calls `parentbased_…`; how a sampler describes itself tells it.
    """
    said = sampler.get_description()
    return "ParentBased{" in said and ",remoteParentSampled:AlwaysOnSampler," in said
