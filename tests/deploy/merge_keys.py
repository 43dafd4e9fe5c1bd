"""The lists of manifests that the API server merges entry by entry, and what it would refuse in them.

Helm 4 and `kubectl apply --server-side` apply on the server. It finds an entry by the list's keys, as the
OpenAPI description of Kubernetes publishes them (`x-kubernetes-list-map-keys`): two entries of one key are
an error, and so is an entry without its key. Helm 3 and a plain `kubectl apply` merge by
`x-kubernetes-patch-merge-key`: there the second entry of a key overwrites the first, without an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from kubernetes_validate import utils

from tests.deploy.render import Manifest
from tests.deploy.schemas import VERSIONS, is_custom

_KEYS, _KIND, _PATCH = (f"x-kubernetes-{name}" for name in ("list-map-keys", "list-type", "patch-merge-key"))
_PREFIX = "io.k8s.api."
_POD = "io.k8s.api.core.v1.PodSpec"
# Published as text only, in the descriptions of ContainerPort and ServicePort.
_DEFAULTS = {"protocol": "TCP"}


def problems(manifest: Manifest) -> list[str]:
    """Return what is wrong with the keys of a manifest's lists, one line each."""
    if is_custom(manifest):
        pods = _pod_specs(manifest, manifest["kind"])
        return [line for path, pod in pods for line in _walk(pod, _definition(_POD), path)]
    group, _, version = manifest["apiVersion"].rpartition("/")
    name = f"{group.split('.')[0] or 'core'}.{version}.{manifest['kind']}"
    return list(_walk(manifest, _definition(_PREFIX + name), manifest["kind"]))


def _definition(name: str) -> dict[str, Any]:
    file = f"kubernetes-json-schema/v{VERSIONS[-1]}-local-strict/_definitions.json"
    found: dict[str, Any] = utils.schema_contents(file, VERSIONS[-1])["$defs"][name]
    return found


def _pod_specs(value: Any, path: str) -> Iterator[tuple[str, Manifest]]:
    """Yield the pod specs inside a custom resource, whose published schemas here have no keys."""
    if isinstance(value, dict):
        if isinstance(value.get("containers"), list):
            yield path, value
            return
        for name, child in value.items():
            yield from _pod_specs(child, f"{path}.{name}")
    elif isinstance(value, list):
        for place, child in enumerate(value):
            yield from _pod_specs(child, f"{path}[{place}]")


def _walk(value: Any, schema: dict[str, Any], path: str) -> Iterator[str]:
    reference = schema.get("$ref")
    if reference is not None:
        schema = {**_definition(reference.rpartition("/")[2]), **schema}
    if isinstance(value, dict):
        for name, child in value.items():
            below = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
            if isinstance(below, dict):
                yield from _walk(child, below, f"{path}.{name}")
    elif isinstance(value, list):
        yield from _list_problems(value, schema, path)
        for place, child in enumerate(value):
            yield from _walk(child, schema.get("items", {}), f"{path}[{place}]")


def _list_problems(entries: list[Any], schema: dict[str, Any], path: str) -> Iterator[str]:
    if schema.get(_KIND) == "set":
        yield from _repeated(entries, path, "value")
    elif schema.get(_KIND) == "map":
        keys = schema[_KEYS]
        for place, entry in enumerate(entries):
            for key in keys:
                if entry.get(key, _DEFAULTS.get(key)) in (None, ""):
                    yield f"{path}[{place}]: no {key}"
        merged = {tuple(keys), *([(schema[_PATCH],)] if _PATCH in schema else [])}
        for by in sorted(merged):
            values = [tuple(entry.get(key, _DEFAULTS.get(key)) for key in by) for entry in entries]
            yield from _repeated(values, path, ", ".join(by))


def _repeated(values: list[Any], path: str, key: str) -> Iterator[str]:
    for value, times in Counter(values).items():
        if times > 1:
            yield f"{path}: {times} entries of {key} {value}"
