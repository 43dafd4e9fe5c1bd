"""What is counted of the versions of drafts."""

from __future__ import annotations

import pytest

from galley.common.metrics import catalogue
from galley.common.metrics.labels import GATEWAY, NO_VERSION
from galley.common.metrics.registry import Registry
from galley.core.versions.split import Split
from services.gateway.telemetry.component_metrics import VersionMetrics
from tests.fakes.readings import number, total


@pytest.fixture
def registry() -> Registry:
    return Registry(GATEWAY)


@pytest.fixture
def metrics(registry: Registry) -> VersionMetrics:
    return VersionMetrics(registry)


def test_sessions_and_tokens_are_counted_by_version(registry: Registry, metrics: VersionMetrics) -> None:
    metrics.finished("v2", 100, 60)
    metrics.finished("v2", 10, 0)
    metrics.finished("", 7, 3)
    for name, sessions, output, accepted in (("v2", 2, 110, 60), (NO_VERSION, 1, 7, 3)):
        assert number(registry, catalogue.DRAFT_VERSION_SESSIONS, name) == sessions
        assert number(registry, catalogue.DRAFT_VERSION_OUTPUT_TOKENS, name) == output
        assert number(registry, catalogue.DRAFT_VERSION_ACCEPTED_TOKENS, name) == accepted


def test_the_latest_versions_have_series(registry: Registry, metrics: VersionMetrics) -> None:
    """A learner makes a new version each cycle, and both arms of the latest trial must be seen."""
    for index in range(40):
        metrics.finished("v0", 2, 1)
        metrics.finished(f"v{index}", 2, 1)
    for metric, each in (
        (catalogue.DRAFT_VERSION_SESSIONS, 1),
        (catalogue.DRAFT_VERSION_OUTPUT_TOKENS, 2),
        (catalogue.DRAFT_VERSION_ACCEPTED_TOKENS, 1),
    ):
        assert number(registry, metric, "v0") == 41 * each
        assert number(registry, metric, "v39") == each
        assert total(registry, metric) == (41 + 15) * each, "16 series"


def test_decisions_are_there_from_the_start(registry: Registry, metrics: VersionMetrics) -> None:
    """An alert on their increase would miss the first one of a series that begins with it."""
    assert number(registry, catalogue.DRAFT_VERSION_DECISIONS, "rolled_back") == 0
    metrics.decided("rolled_back")
    assert number(registry, catalogue.DRAFT_VERSION_DECISIONS, "rolled_back") == 1
    assert number(registry, catalogue.DRAFT_VERSION_DECISIONS, "promoted") == 0


@pytest.mark.parametrize(
    ("split", "shares"),
    [
        (Split(), {}),
        (Split(canary="v2", share=0.1), {"v2": 0.1, NO_VERSION: 0.9}),
        (Split(stable="v1", canary="v2", share=0.1), {"v2": 0.1, "v1": 0.9}),
        (Split(stable="v2"), {"v2": 1.0}),
    ],
)
def test_shares_are_those_of_the_split_in_force(
    registry: Registry, metrics: VersionMetrics, split: Split, shares: dict[str, float]
) -> None:
    assert total(registry, catalogue.DRAFT_VERSION_SHARE) == 0
    metrics.observe_split(lambda: split)
    for version, share in shares.items():
        assert number(registry, catalogue.DRAFT_VERSION_SHARE, version) == share
    assert total(registry, catalogue.DRAFT_VERSION_SHARE) == pytest.approx(sum(shares.values()))
