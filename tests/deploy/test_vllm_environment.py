"""The script that makes vLLM's environment: what is found afterwards is whole, and failures are seen."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.render import LOCKS, ROOT

# Stands for Python: makes an environment of itself, and installs, or fails as it is told.
STUB = """#!/usr/bin/env bash
if [[ $2 == venv ]]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; exit; fi
if [[ " $* " == *" --dry-run "* ]]; then exit "$FAILS_TO_FIND"; fi
exit "$FAILS_TO_INSTALL"
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("scripts/venv_vllm.sh", "constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(LOCKS, tmp_path / "deploy" / "locks")
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(STUB)
    python.chmod(0o755)
    return tmp_path


def make(tree: Path, *, finds: int = 0, installs: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "VENV": str(tree / "venv"),
        "XDG_CACHE_HOME": str(tree / "cache"),
        "FAILS_TO_FIND": str(finds),
        "FAILS_TO_INSTALL": str(installs),
    }
    command = [tree / "scripts" / "venv_vllm.sh"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_it_is_made_once_and_found_by_other_checkouts(tree: Path) -> None:
    assert "installing vLLM" in make(tree).stdout
    made = (tree / ".venv-vllm").resolve()
    assert (tree / ".venv-vllm" / "bin" / "python").exists()
    (tree / ".venv-vllm").unlink()
    again = make(tree, finds=1, installs=1)
    assert (again.returncode, again.stdout) == (0, "")
    assert (tree / ".venv-vllm").resolve() == made


def test_other_locks_have_another_environment(tree: Path) -> None:
    make(tree)
    made = (tree / ".venv-vllm").resolve()
    (tree / "constraints.txt").write_text("pytest==0\n")
    make(tree)
    assert (tree / ".venv-vllm").resolve() != made
    assert made.exists(), "others may use it"


def test_packages_that_cannot_be_had_have_a_status_of_their_own(tree: Path) -> None:
    done = make(tree, finds=1)
    assert done.returncode == 3
    assert "vLLM is not installed: no index here has torch==" in done.stderr
    assert not (tree / ".venv-vllm").exists()


def test_a_failed_install_fails_and_leaves_nothing_to_be_found(tree: Path) -> None:
    make(tree)
    (tree / "constraints.txt").write_text("pytest==0\n")
    done = make(tree, installs=1)
    assert done.returncode not in {0, 3}
    assert not (tree / ".venv-vllm").exists(), "one of other locks"
    assert make(tree).returncode == 0
    assert (tree / ".venv-vllm" / "bin" / "python").exists()
