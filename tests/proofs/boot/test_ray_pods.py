"""The chart's RayService serves: its pods, started as KubeRay does, pass the rendered probes, and drain."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.render import ROOT, default_values, tool
from tests.integration.services.ray.conftest import four_heads
from tests.proofs.boot.ray_trial import REFUSED
from tests.proofs.boot.sandbox import OWN_NAMESPACES, sandbox_problem, trial_environment

__all__ = ["four_heads"]

_TRIAL_S = 540.0
# Half a minute as a rule; Ray on a machine that is busy takes its time.
pytestmark = pytest.mark.timeout(1200)
Record = dict[str, Any]


@pytest.fixture(scope="module")
def record(four_heads: Path, tmp_path_factory: pytest.TempPathFactory) -> Record:
    problem = sandbox_problem()
    assert problem is None, problem
    tool("helm")  # fetched from here, if need be: a trial has no way out
    file = tmp_path_factory.mktemp("ray-pods") / "record.json"
    trial = [sys.executable, "-P", "-m", "tests.proofs.boot.ray_trial", str(four_heads), str(file)]
    subprocess.run(
        [*OWN_NAMESPACES, *trial], cwd=ROOT, env=trial_environment(), timeout=_TRIAL_S, check=False
    )
    reported: Record = json.loads(file.read_text())
    assert "failed" not in reported, reported
    return reported


def test_only_the_token_holder_deploys(record: Record) -> None:
    assert (record["without_token"], record["with_token"]) == (REFUSED, 200)


def test_a_pod_is_ready_once_its_replica_is(record: Record) -> None:
    assert record["not_ready_before"]
    assert record["alive"] == [None, None]
    assert record["registered"] == [f"{record['worker']}:{default_values()['target']['port']}"]


def test_a_pod_that_is_deleted_drains(record: Record) -> None:
    assert record["deleted"]["ended"], record["deleted"]
    assert record["registered_after"] == []
    assert "finished draining" in record["output"]["worker"]
