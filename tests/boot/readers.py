"""Who reads an environment variable that the chart sets: a service's settings, the pod's own spec, or a package."""

from __future__ import annotations

import importlib.metadata
import re
from functools import cache
from typing import TYPE_CHECKING

from tests.boot.environment import references_in
from tests.boot.images import Registry, UnknownImage
from tests.deploy.render import ROLES, ROOT
from tests.deploy.settings_of import variables_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.deploy.render import Manifest

_PREFIX = "GALLEY_"
_REQUIREMENT = re.compile(r"[A-Za-z0-9._-]+")
# What interpreters and C libraries read, whose text says nothing of it.
_SYSTEM = frozenset({"PATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONSAFEPATH"})


def role_of(container: Manifest) -> str:
    """The service whose image a container runs; empty for others."""
    name = Registry.name_of(container["image"])
    role = next((known for known in ROLES if name.startswith(f"galley-{known}")), "")
    if not role and name != "valkey":
        raise UnknownImage(container["image"])
    return role


def unread_variables(container: Manifest) -> set[str]:
    """The variables of a container that nothing reads."""
    role = role_of(container)
    given = {entry["name"] for entry in container.get("env") or []}
    return {name for name in given - references_in(container) if not _is_read(name, role, container)}


def _is_read(name: str, role: str, container: Manifest) -> bool:
    if not role:
        return False
    if name.startswith(_PREFIX):
        module = module_of(container, role)
        if module == f"services.{role}":
            return name in variables_of(role)
        return name in _literals_of_services()
    return name in _SYSTEM or any(name in text for text in _texts_of_packages(role))


def module_of(container: Manifest, role: str) -> str:
    """What a container of ours runs; without a command of its own, the service."""
    command = [*(container.get("command") or []), *(container.get("args") or [])]
    if not container.get("command"):
        return f"services.{role}"
    return str(command[command.index("-m") + 1]) if "-m" in command else command[0]


@cache
def _literals_of_services() -> frozenset[str]:
    """Names of variables that stand in the services' source."""
    pattern = re.compile(r'"(GALLEY_[A-Z0-9_]+)"')
    texts = (path.read_text() for path in (ROOT / "services").rglob("*.py"))
    return frozenset(name for text in texts for name in pattern.findall(text))


@cache
def _texts_of_packages(role: str) -> tuple[str, ...]:
    """The Python of what a role's extra installs, but for the heaviest, which are read by no variable of ours."""
    return tuple(
        path.read_text(errors="replace")
        for name in sorted(_closure(f"galley[{role}]"))
        for path in _python_of(name)
    )


def _python_of(name: str) -> Iterator[Path]:
    distribution = importlib.metadata.distribution(name)
    for file in distribution.files or ():
        path = distribution.locate_file(file)
        if file.suffix == ".py" and "environ" in file.name + (file.parent.name if file.parent else ""):
            yield ROOT / str(path)
        elif file.suffix == ".py" and file.name in ("constants.py", "__init__.py", "environment_variables.py"):
            yield ROOT / str(path)


def _closure(requirement: str) -> set[str]:
    """A distribution and all that it requires, here."""
    wanted, found = [requirement], set[str]()
    while wanted:
        name, _, extra = wanted.pop().partition("[")
        key = f"{name.lower()}[{extra}"
        if key in found:
            continue
        found.add(key)
        try:
            requires = importlib.metadata.distribution(name).requires or []
        except importlib.metadata.PackageNotFoundError:
            continue
        wanted += [_plain(text) for text in requires if _holds(text, extra.rstrip("]").split(","))]
    return {key.partition("[")[0] for key in found}


def _plain(requirement: str) -> str:
    name = _REQUIREMENT.match(requirement)
    rest = requirement[name.end() :] if name else ""
    extras = re.match(r"\[[^]]*\]", rest)
    return (name[0] if name else "") + (extras[0] if extras else "")


def _holds(requirement: str, extras: list[str]) -> bool:
    marker = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", requirement)
    return marker is None or marker[1] in extras
