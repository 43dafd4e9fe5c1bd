"""Which spans are kept, whatever chance says."""

from __future__ import annotations

import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags

from services.common.sampling import GalleySampler
from services.common.telemetry import context_from
from services.core import trace_names as names

NEVER, ALWAYS = ParentBased(ALWAYS_OFF), ParentBased(ALWAYS_ON)
ROOT = Context()
KEPT = context_from(f"00-{1:032x}-{2:016x}-01")
LEFT = context_from(f"00-{1:032x}-{2:016x}-00")


def keeps(
    inner: Sampler,
    parent: Context = ROOT,
    name: str = names.TEXT_COMPLETION,
    attributes: dict[str, bool] | None = None,
    links: tuple[bool, ...] = (),
) -> bool:
    linked = [Link(SpanContext(3, 4, is_remote=True, trace_flags=TraceFlags(int(kept)))) for kept in links]
    sampler = GalleySampler(inner)
    result = sampler.should_sample(parent, 5, name, SpanKind.SERVER, attributes, linked)
    return result.decision.name == "RECORD_AND_SAMPLE"


@pytest.mark.parametrize("parent", [ROOT, KEPT, LEFT])
def test_what_was_forced_is_kept(parent: Context) -> None:
    assert keeps(NEVER, parent, attributes={names.FORCED: True})
    assert not keeps(ParentBased(ALWAYS_OFF), LEFT, attributes={names.FORCED: False})


def test_the_rest_is_as_the_environment_says() -> None:
    assert [keeps(NEVER, ROOT), keeps(NEVER, KEPT), keeps(NEVER, LEFT)] == [False, True, False]
    assert [keeps(ALWAYS, ROOT), keeps(ALWAYS, KEPT), keeps(ALWAYS, LEFT)] == [True, True, False]


@pytest.mark.parametrize("name", [names.VERIFY_BATCH, names.DRAFT_BATCH])
@pytest.mark.parametrize("inner", [NEVER, ALWAYS])
def test_a_batch_is_kept_for_those_that_it_serves_and_for_nobody_else(inner: Sampler, name: str) -> None:
    assert not keeps(inner, name=name)
    assert not keeps(inner, name=name, links=(False, False))
    assert keeps(inner, name=name, links=(False, True))
    assert keeps(inner, KEPT, name)


def test_it_says_what_it_is() -> None:
    assert "GalleySampler" in GalleySampler(NEVER).get_description()
