"""What Kubernetes and the makers of custom resources say of manifests, read strictly.

Kubernetes' own kinds go through kubernetes-validate, which passes custom resources unread; those are checked
against the schemas beside the repository, with every field that a schema does not know taken as an error.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import jsonschema
import pytest
from kubernetes_validate import utils

from tests.deploy.render import ROOT, Manifest

CRDS = ROOT.parent / "shared" / "crds"
NOT_HERE = "the schemas of custom resources are not here"
# The package lists every version twice: with and without unknown fields.
VERSIONS = tuple(dict.fromkeys(utils.all_versions()))[-2:]
"""The two newest of Kubernetes that kubernetes-validate knows."""

_BUILT_IN = frozenset({"v1", "apps/v1", "autoscaling/v2", "networking.k8s.io/v1", "policy/v1"})
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
    elif CRDS.is_dir():
        _custom(manifest["apiVersion"], manifest["kind"]).validate(manifest)


def need_crds() -> None:
    """Skip the test if the schemas of custom resources are not beside the repository."""
    if not CRDS.is_dir():
        pytest.skip(NOT_HERE)


@functools.cache
def _custom(api_version: str, kind: str) -> jsonschema.protocols.Validator:
    group, version = api_version.split("/")
    schema = json.loads((CRDS / f"{group}_{kind}_{version}.json").read_text())
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
