"""Trials of the chart, each run once for all tests that read its record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from services.engine.truncate import truncate_model
from tests.boot.machine import why_no_sandbox
from tests.boot.runs import run_trial
from tests.boot.worlds import SECURED, SMALL, TWICE, plan
from tests.deploy.matrix import laid_over

if TYPE_CHECKING:
    from pathlib import Path

_BOOT_S, _WHOLE_S = 240.0, 480.0
_LAYERS = (0, 1, 28, 29)


@pytest.fixture(scope="session")
def defaults(default_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The chart as it comes: booted, asked, and knocked at."""
    folder = tmp_path_factory.mktemp("defaults")
    given = plan(default_model_dir, folder / "made", SMALL, isolated=why_no_sandbox() is None)
    return run_trial(given, folder / "trial", _BOOT_S)


@pytest.fixture(scope="session")
def disturbed(default_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """With TLS, keys and several replicas: every role rolled under load, and some pods killed and stopped.

    The model is a few layers of the default one: what is tried is not how fast it starts and computes.
    """
    folder = tmp_path_factory.mktemp("disturbed")
    model = truncate_model(default_model_dir, list(_LAYERS), folder / "model")
    for path in model.iterdir():
        path.chmod(0o644)  # as what lies in an image
    values = laid_over([SECURED, TWICE, {"gateway": {"preStopSeconds": 2}}])
    given = plan(
        model,
        folder / "made",
        values,
        pause_s=0.5,
        isolated=why_no_sandbox() is None,
        rolls=("gateway", "draft", "redis", "target"),
        killed=("gateway", "draft"),
        frozen=("target",),
    )
    return run_trial(given, folder / "trial", _WHOLE_S)
