"""The pages lead somewhere: what they link and name is there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
# Below these, a path in code is a file or folder of the repository; what commands make is not.
_PATH = re.compile(r"`((?:tests|docs|bench|services|deploy|helm|scripts|proto)/[\w./-]+)`")
_CHANGELOG = ROOT / "CHANGELOG.md"
CURRENT = [page for page in PAGES if page != _CHANGELOG]
_MADE = ("bench/.peers/", "bench/results/attacks/")
_LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")
_MAKE = re.compile(r"(?:`|^)make ([a-z][a-z0-9-]*)", re.MULTILINE)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture(scope="module")
def left_out() -> frozenset[Path]:
    """Files and folders that lie here but in no clone, such as the plots of benchmarks."""
    command = ("git", "ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory")
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return frozenset(ROOT / path for path in listed.split("\0") if path)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path, left_out: frozenset[Path]) -> None:
    for link in _LINK.findall(page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert left_out.isdisjoint((target.resolve(), *target.resolve().parents)), link
        assert not anchor or anchor in anchors_of(target), link


@pytest.mark.parametrize("page", CURRENT, ids=name_of)
def test_paths_are_there(page: Path) -> None:
    """As written; a page of docs may leave out services/, tests/ or the end of a decision's name."""
    for path in _PATH.findall(page.read_text()):
        # The wire's stubs go by a name that only protoc knows (decision 002).
        if path in _MADE or path.endswith(".proto"):
            continue
        results = [path, f"tests/{path}", f"{path}-*.md"]
        assert any(list(ROOT.glob(pattern)) for pattern in results), path


@pytest.mark.parametrize("page", CURRENT, ids=name_of)
def test_modules_are_there(page: Path) -> None:
    """A page may leave out `galley/`, `services/` or `tests/`."""
    for path in re.findall(r"`([a-z_]+/[\w/]+\.py)`", page.read_text()):
        assert any((ROOT / folder / path).exists() for folder in (".", "galley", "services", "tests")), path


@pytest.mark.parametrize("page", CURRENT, ids=name_of)
def test_targets_of_make_are_there(page: Path) -> None:
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(_MAKE.findall(page.read_text())) <= targets
