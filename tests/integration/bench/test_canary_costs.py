"""The trials of the benchmark of canaries."""

from __future__ import annotations

import pytest

from bench.living.costs import canary
from bench.living.costs.canary import CANARY, DRAINED, HALF, Trial
from galley.common.registry.trials import DraftVersions
from galley.core.versions.counts import VersionCounts
from tests.fakes.redis_servers import VALKEY, running


async def test_a_trial_that_the_rule_ends_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arms of the same weights differ by chance, so the rule ends a trial now and then."""
    monkeypatch.setattr(canary, "_APPLIED_S", 0)
    with running(VALKEY) as server:
        versions = DraftVersions(server.url)
        trial = Trial(versions)
        for is_ended in (True, False):
            await trial.begin(HALF)
            for version in ("", CANARY):
                await versions.add(version, VersionCounts(sessions=3), (await versions.read()).trial)
            if is_ended:
                await versions.roll_back(author="rule", reason="worse")
            assert await trial.end(HALF) == (not is_ended)
        assert trial.sessions[HALF] == (6, 3)
        await trial.begin(DRAINED)
        assert await trial.end(DRAINED)
        await versions.close()
