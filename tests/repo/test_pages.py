"""The pages lead somewhere: what they link and name is there, and the map names every module."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
# Below these, a path in code is a file or folder of the repository; what commands make is not.
_PATH = re.compile(r"`((?:tests|docs|bench|services|deploy|helm|scripts|proto)/[\w./-]+)`")
_MADE = ("bench/.peers/", "bench/results/attacks/")
_LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")
_MAKE = re.compile(r"(?:`|^)make ([a-z-]+)", re.MULTILINE)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors_of(page: Path) -> set[str]:
    """Its headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_are_there(page: Path) -> None:
    """As written; a page of docs may leave out services/, tests/ or the end of a decision's name."""
    for path in _PATH.findall(page.read_text()):
        # The wire's stubs go by a name that only protoc knows (decision 002).
        if path in _MADE or path.endswith(".proto"):
            continue
        found = [path, f"tests/{path}", f"{path}-*.md"]
        assert any(list(ROOT.glob(pattern)) for pattern in found), path


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_modules_are_there(page: Path) -> None:
    """`core/stats.py` and the like: below services/ as a rule, else below tests/."""
    for path in re.findall(r"`([a-z_]+/[\w/]+\.py)`", page.read_text()):
        assert any((ROOT / folder / path).exists() for folder in (".", "services", "tests")), path


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_targets_of_make_are_there(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(_MAKE.findall(page.read_text())) <= targets


def test_the_map_names_every_module() -> None:
    text = (ROOT / "docs" / "structures.md").read_text()
    named = {word.rpartition("/")[2] for word in re.findall(r"`([\w./*-]+\.py)`", text)}
    modules = {
        path
        for path in (ROOT / "services").rglob("*.py")
        if path.name not in {"__init__.py", "__main__.py"} and "pb" not in path.parts
    }
    unnamed = {name_of(path) for path in modules if not any(fnmatch(path.name, name) for name in named)}
    assert not unnamed, "name them in docs/structures.md"


def test_what_the_map_names_is_there() -> None:
    text = (ROOT / "docs" / "structures.md").read_text()
    there = {
        path.name
        for folder in ("services", "tests", "scripts", "bench")
        for path in (ROOT / folder).rglob("*")
    }
    named = {word.rpartition("/")[2] for word in re.findall(r"`([\w./-]+\.(?:py|sh))`", text)}
    assert named <= there
