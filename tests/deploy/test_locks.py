"""Test what the images are made of: the locks."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.render import EXTRAS, LOCKS, ROOT, locked

CUDA = re.compile(r"^(nvidia-|cuda-|triton$)")
NAMES = ("build", "draft", "gateway", "model", "target", "torch-cpu", "torch-cuda", "vllm-cpu", "vllm-cuda")


def entries(name: str) -> dict[str, str]:
    return locked((LOCKS / f"{name}.txt").read_text())


def write_locks(folder: Path, *wheel: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "scripts" / "locks.sh"), str(folder), *wheel]
    environment = {**os.environ, "VENV": sys.prefix}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def pinned(file: str = "constraints.txt") -> dict[str, str]:
    lines = (ROOT / file).read_text().splitlines()[1:]
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}


def test_these_are_the_locks() -> None:
    assert {path.stem for path in LOCKS.iterdir()} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_locks_hold_the_tested_pins_with_hashes(name: str) -> None:
    text = (LOCKS / f"{name}.txt").read_text()
    result = entries(name)
    assert "".join(f"{entry}\n" for entry in result.values()) == text
    versions = {package: entry.partition("==")[2].split()[0] for package, entry in result.items()}
    pins = pinned() | (pinned("constraints-vllm.txt") if name.startswith("vllm-") else {})
    assert {package: version.partition("+")[0] for package, version in versions.items()} == {
        package: pins[package] for package in versions
    }
    for entry in result.values():
        digests = re.findall(r"--hash=sha256:([0-9a-f]{64})(?: \\)?$", entry, re.MULTILINE)
        assert len(digests) == entry.count("--hash=") > 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_vllm_shares_the_layer_of_torch(device: str) -> None:
    """vLLM pins the same version, and its lock adds to that layer only."""
    assert not entries(f"vllm-{device}").keys() & entries(f"torch-{device}").keys()
    assert not entries(f"vllm-{device}").keys() & {"torchaudio", "torchcodec", "torchvision"}


def test_vllms_pins_are_those_that_differ() -> None:
    ours, used = pinned(), entries("vllm-cpu").keys() | entries("vllm-cuda").keys()
    vllms = pinned("constraints-vllm.txt")
    assert vllms.keys() <= used
    assert not [package for package, version in vllms.items() if ours.get(package) == version]


@pytest.mark.parametrize("name", ["draft", "target"])
def test_torch_is_a_layer_of_its_own(name: str) -> None:
    assert "torch" not in entries(name)
    assert not [package for package in entries(name) if CUDA.match(package)]
    for device in ("cpu", "cuda"):
        assert not entries(name).keys() & entries(f"torch-{device}").keys()


def test_torch_builds_are_distinguished() -> None:
    assert list(entries("torch-cpu")) == ["torch"]
    assert "+cpu " in entries("torch-cpu")["torch"]
    assert entries("torch-cpu")["torch"].count("--hash=") == 2, "of x86-64 and arm64"
    assert "+" not in entries("torch-cuda")["torch"]
    assert all(package == "torch" or CUDA.match(package) for package in entries("torch-cuda"))


def test_the_gateway_has_no_torch() -> None:
    assert not entries("gateway").keys() & {"torch", "transformers", "numba", "safetensors", "ray"}


@pytest.mark.parametrize("role", sorted(EXTRAS))
def test_all_that_the_extra_asks_for_is_there(role: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requests = {canonicalize_name(Requirement(line).name) for line in project["dependencies"]}
    requests |= {
        canonicalize_name(Requirement(line).name) for line in project["optional-dependencies"][EXTRAS[role]]
    }
    there = entries(role).keys() | (set() if role == "gateway" else {"torch"})
    assert requests - {"galley"} <= there


def test_another_torch_for_the_cpu_needs_its_wheel(tmp_path: Path) -> None:
    for lock in LOCKS.glob("*.txt"):
        shutil.copy(lock, tmp_path)
    torch_cpu = tmp_path / "torch-cpu.txt"
    before = torch_cpu.read_text()
    torch_cpu.write_text(before.replace("2.13.0", "2.12.0"))
    done = write_locks(tmp_path)
    assert done.returncode == 1
    assert "name its wheels: make locks TORCH_WHEEL='FILE FILE'" in done.stderr
    done = write_locks(tmp_path, str(tmp_path / "torch-2.12.0+cpu-cp311-cp311-linux_x86_64.whl"))
    assert done.returncode == 1
    assert "must be a wheel of torch 2.13.0+cpu" in done.stderr
    wheels = [tmp_path / f"torch-2.13.0+cpu-cp311-cp311-linux_{one}.whl" for one in ("x86_64", "aarch64")]
    for wheel in wheels:
        wheel.write_bytes(wheel.name.encode())
    assert write_locks(tmp_path, *map(str, wheels)).returncode == 0
    hashes = sorted(hashlib.sha256(wheel.name.encode()).hexdigest() for wheel in wheels)
    (entry,) = locked(torch_cpu.read_text()).values()
    assert entry == torch_cpu.read_text().strip()
    assert re.findall(r"sha256:(\w+)", entry) == hashes
