"""`scripts/run_tests.sh`: a test that fails is run once more, alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "run_tests.sh"
UNSTABLE = """
import pathlib, pytest
@pytest.mark.parametrize("number", range({count}))
def test_fails_once(number):
    seen = pathlib.Path(f"seen {{number}}")
    before = seen.exists()
    seen.touch()
    assert before
def test_passes():
    assert not pathlib.Path("passed").exists()
    pathlib.Path("passed").touch()
"""


def _run(folder: Path, tests: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(tests)
    command = [str(SCRIPT), sys.executable, "tier", "-p", "xdist.plugin", "-n", "2", "test_it.py"]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=120
    )


def test_a_test_that_passes_alone_is_named_and_the_run_passes(tmp_path: Path) -> None:
    ended = _run(tmp_path, UNSTABLE.format(count=2))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    named = ended.stdout.splitlines()[-1]
    assert named.startswith("== UNSTABLE")
    assert "test_fails_once[0]" in named
    assert "test_fails_once[1]" in named
    assert "test_passes" not in named


@pytest.mark.parametrize(
    ("tests", "status"),
    [
        ("def test_is_broken():\n    assert False\n", 1),
        (UNSTABLE.format(count=4), 1),
        ("import a_module_that_is_not_there\n", 2),
        ("", 5),
    ],
    ids=["broken", "too many", "not imported", "no tests"],
)
def test_what_is_broken_fails_the_run(tmp_path: Path, tests: str, status: int) -> None:
    ended = _run(tmp_path, tests)
    assert ended.returncode == status, ended.stdout + ended.stderr
    assert "UNSTABLE" not in ended.stdout
