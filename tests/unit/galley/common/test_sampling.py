"""Which spans are kept, whatever chance says."""

from __future__ import annotations

import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler
from opentelemetry.trace import SpanKind

from galley.common.tracing.sampling import GalleySampler, follows_sampled_parents
from galley.common.tracing.telemetry import context_from
from galley.core import names

NEVER, ALWAYS = ParentBased(ALWAYS_OFF), ParentBased(ALWAYS_ON)
ROOT = Context()
KEPT = context_from(f"00-{1:032x}-{2:016x}-01")
LEFT = context_from(f"00-{1:032x}-{2:016x}-00")


def keeps(
    inner: Sampler,
    parent: Context = ROOT,
    attributes: dict[str, bool] | None = None,
) -> bool:
    result = GalleySampler(inner).should_sample(parent, 5, names.TEXT_COMPLETION, SpanKind.SERVER, attributes)
    return result.decision.name == "RECORD_AND_SAMPLE"


@pytest.mark.parametrize("parent", [ROOT, KEPT, LEFT])
def test_what_was_forced_is_kept(parent: Context) -> None:
    assert keeps(NEVER, parent, attributes={names.FORCED: True})
    assert not keeps(ParentBased(ALWAYS_OFF), LEFT, attributes={names.FORCED: False})


def test_the_rest_is_as_the_environment_says() -> None:
    assert [keeps(NEVER, ROOT), keeps(NEVER, KEPT), keeps(NEVER, LEFT)] == [False, True, False]
    assert [keeps(ALWAYS, ROOT), keeps(ALWAYS, KEPT), keeps(ALWAYS, LEFT)] == [True, True, False]


@pytest.mark.parametrize(
    ("told", "follows"),
    [
        ("", True),
        ("parentbased_always_off", True),
        ("parentbased_traceidratio", True),
        ("always_on", False),
        ("always_off", False),
        ("traceidratio", False),
    ],
)
def test_who_keeps_what_is_beneath_a_sampled_caller_is_known_without_asking(
    monkeypatch: pytest.MonkeyPatch, told: str, follows: bool
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", told or "parentbased_always_on")
    sampler = GalleySampler(TracerProvider(shutdown_on_exit=False).sampler)
    assert follows_sampled_parents(sampler) == follows
    assert not follows_sampled_parents(
        GalleySampler(ParentBased(ALWAYS_ON, remote_parent_sampled=ALWAYS_OFF))
    )


def test_it_says_what_it_is() -> None:
    assert "GalleySampler" in GalleySampler(NEVER).get_description()
