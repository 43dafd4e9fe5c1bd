"""Trials of the chart, each run once for all tests that read its record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.deploy.matrix import SWITCHES, laid_over
from tests.integration.services.ray.conftest import four_heads
from tests.proofs.boot.runs import run_trial
from tests.proofs.boot.worlds import RANKS, SECURED, SMALL, TWICE, few_layers_of, plan

__all__ = ["four_heads"]

# A trial takes one to two minutes on an idle machine; these only end one that hangs.
_TRIAL_S = 900.0


@pytest.fixture(scope="session")
def defaults(default_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The chart as it comes: booted, asked, and knocked at."""
    folder = tmp_path_factory.mktemp("defaults")
    given = plan(default_model_dir, folder / "made", SMALL)
    return run_trial(given, folder / "trial", _TRIAL_S)


@pytest.fixture(scope="session")
def few_layers(default_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of some of the default one's."""
    return few_layers_of(default_model_dir, tmp_path_factory.mktemp("few") / "model")


@pytest.fixture(scope="session")
def grouped(few_layers: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A target over several pods, with TLS, KEDA and a PodMonitor; one of its pods killed."""
    folder = tmp_path_factory.mktemp("grouped")
    switches = {"tls": "mutual", "draft": "none", "edge": "route", "seen": "pods", "scaled": "keda"}
    settings = [SWITCHES[switch][setting] for switch, setting in switches.items()]
    values = laid_over([SMALL, RANKS, *settings])
    given = plan(few_layers, folder / "made", values, killed=("target",), patience_s=180.0)
    return run_trial(given, folder / "trial", _TRIAL_S)


@pytest.fixture(scope="session")
def disturbed(few_layers: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """With TLS, keys and several replicas: every role rolled under load, and some pods killed and stopped."""
    folder = tmp_path_factory.mktemp("disturbed")
    values = laid_over([SECURED, TWICE, {"gateway": {"preStopSeconds": 2}}])
    given = plan(
        few_layers,
        folder / "made",
        values,
        pause_s=0.5,
        brief=1,
        rolls=("gateway", "draft", "redis", "target"),
        killed=("gateway", "draft"),
        frozen=("target",),
    )
    return run_trial(given, folder / "trial", _TRIAL_S)
