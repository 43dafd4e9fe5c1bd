"""Sampling of requests: by `OTEL_TRACES_SAMPLER`, except for forced ones.

Imports the SDK: import this module only where traces are on.
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
    """Sample forced requests, and others by `inner`."""

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
        """Return the decision of the SDK's interface."""
        if attributes is not None and attributes.get(names.FORCED):
            parent = trace.get_current_span(parent_context).get_span_context()
            return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes, parent.trace_state)
        return self._inner.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)

    def get_description(self) -> str:
        """Return a readable description."""
        return f"GalleySampler({self._inner.get_description()})"


def follows_sampled_parents(sampler: Sampler) -> bool:
    """Return True if the sampler keeps all spans below a sampled remote span, as `parentbased_…` ones do.

    The sampler's description says so.
    """
    description = sampler.get_description()
    return "ParentBased{" in description and ",remoteParentSampled:AlwaysOnSampler," in description
