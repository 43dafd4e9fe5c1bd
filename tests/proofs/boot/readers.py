"""Who reads a variable that the chart sets: a service's settings, the pod's own spec, or a package."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement

from tests.deploy.render import EXTRAS, ROLES, ROOT, Manifest
from tests.deploy.settings_of import variables_of
from tests.proofs.boot.environment import references_in
from tests.proofs.boot.images import image_name

_PREFIX = "GALLEY_"


def role_of(container: Manifest) -> str:
    """Return the service whose image, or a variant of it, a container runs; empty for others."""
    name = image_name(container["image"])
    return next((role for role in ROLES if name.startswith(f"galley-{role}")), "")


def _extra_of(container: Manifest) -> str:
    return EXTRAS[role_of(container)]


def unread_variables(container: Manifest) -> set[str]:
    """Return the variables of a container of ours that nothing reads."""
    given = {entry["name"] for entry in container.get("env") or []}
    return {name for name in given - references_in(container) if not _is_read(name, container)}


def _is_read(name: str, container: Manifest) -> bool:
    role = role_of(container)
    if not name.startswith(_PREFIX):
        return _is_in_packages(name, _extra_of(container))
    if name.startswith(f"{_PREFIX}{role.upper()}_"):
        return name in variables_of(role)
    return not runs_a_service(container) and name in _names_in_source()


def runs_a_service(container: Manifest) -> bool:
    return not container.get("command")


@cache
def _names_in_source() -> frozenset[str]:
    pattern = re.compile(r'"(GALLEY_[A-Z0-9_]+)"')
    texts = (path.read_text() for top in ("galley", "services") for path in (ROOT / top).rglob("*.py"))
    return frozenset(name for text in texts for name in pattern.findall(text))


@cache
def _is_in_packages(name: str, extra: str) -> bool:
    wanted = name.encode()
    return any(
        wanted in path.read_bytes()
        for distribution in _installed_for(extra)
        for path in _sources(distribution)
    )


def _sources(distribution: str) -> Iterator[Path]:
    files = importlib.metadata.distribution(distribution).files or ()
    return (Path(str(file.locate())) for file in files if file.suffix == ".py")


@cache
def _installed_for(extra: str) -> tuple[str, ...]:
    """Return the distributions beneath galley[extra], without galley itself."""
    wanted = [Requirement(f"galley[{extra}]")]
    seen: set[tuple[str, frozenset[str]]] = set()
    while wanted:
        requirement = wanted.pop()
        key = (requirement.name.lower(), frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        for line in importlib.metadata.requires(requirement.name) or ():
            needed = Requirement(line)
            given = requirement.extras or {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": each}) for each in given):
                wanted.append(needed)
    return tuple(sorted({name for name, _ in seen} - {"galley"}))
