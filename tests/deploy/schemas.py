"""What Kubernetes and the makers of custom resources say of manifests, read strictly.

Kubernetes' own kinds go through kubernetes-validate, which passes custom resources unread; those are checked
against the schemas in `schemas/` and beside the repository, with every field that a schema does not know as
an error.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from kubernetes_validate import utils

from tests.deploy.render import ROOT, Manifest

OWN = ROOT / "tests" / "deploy" / "schemas"
CRDS = ROOT.parent / "shared" / "crds"
NOT_HERE = "the schemas of custom resources are not here"
# The package lists every version twice: with and without unknown fields.
VERSIONS = tuple(dict.fromkeys(utils.all_versions()))[-2:]
"""The two newest of Kubernetes that kubernetes-validate knows."""

_BUILT_IN = frozenset({"v1", "apps/v1", "autoscaling/v2", "batch/v1", "networking.k8s.io/v1", "policy/v1"})
_OPEN = "x-kubernetes-preserve-unknown-fields"
_INT_OR_STRING = "x-kubernetes-int-or-string"
# Cached, since they read megabytes of definitions and list a folder each time.
utils.schema_contents = functools.cache(utils.schema_contents)
utils.all_versions = functools.cache(utils.all_versions)


def is_custom(manifest: Manifest) -> bool:
    return manifest["apiVersion"] not in _BUILT_IN


def check(manifest: Manifest) -> None:
    """Raise ValidationError as Kubernetes would, or by a custom resource's schema if available."""
    _check(json.dumps(manifest, sort_keys=True))


@functools.cache
def _check(text: str) -> None:
    manifest = json.loads(text)
    if not is_custom(manifest):
        for version in VERSIONS:
            utils.validate(manifest, version, strict=True)
    elif (file := _file_of(manifest["apiVersion"], manifest["kind"])) is not None:
        _custom(file).validate(manifest)


def need_crds() -> None:
    """Skip the test if the schemas of custom resources are not beside the repository."""
    if not CRDS.is_dir():
        pytest.skip(NOT_HERE)


def _file_of(api_version: str, kind: str) -> Path | None:
    """Return the schema's file; None if it is not of `schemas/`, and there are none beside the repository."""
    group, version = api_version.split("/")
    name = f"{group}_{kind}_{version}.json"
    if (OWN / name).exists():
        return OWN / name
    return CRDS / name if CRDS.is_dir() else None


@functools.cache
def _custom(file: Path) -> jsonschema.protocols.Validator:
    schema = json.loads(file.read_text())
    return jsonschema.Draft202012Validator(strict(schema, top=True))


def strict(schema: dict[str, Any], *, top: bool = False) -> dict[str, Any]:
    """Return the schema with unknown fields refused, except where it allows any."""
    known = {name: value for name, value in schema.items() if not name.startswith("x-kubernetes")}
    if schema.get(_INT_OR_STRING):
        known.pop("type", None)
        known["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    for name in ("properties", "patternProperties"):
        if name in known:
            known[name] = {key: strict(value) for key, value in known[name].items()}
    for name in ("items", "additionalProperties"):
        if isinstance(known.get(name), dict):
            known[name] = strict(known[name])
    if "properties" in known and "additionalProperties" not in known and not schema.get(_OPEN):
        known["additionalProperties"] = False
    # The schemas call these two plain objects; Kubernetes checks them.
    if top:
        known["properties"]["metadata"] = {"type": "object"}
    return known
