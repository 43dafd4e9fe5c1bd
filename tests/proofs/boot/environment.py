"""Environment, command and arguments of a container, as the kubelet derives them from a pod's spec."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.deploy.render import Manifest
from tests.proofs.boot.objects import NoSuchObject, Objects

_SUFFIXES = {
    "": 1.0,
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
}
_FORM = re.compile(r"(\d+(?:\.\d+)?)([A-Za-z]*)")


def amount(quantity: str | float) -> float:
    form = _FORM.fullmatch(str(quantity))
    if form is None or form[2] not in _SUFFIXES:
        raise ValueError(f"{quantity!r} is no quantity")
    return float(form[1]) * _SUFFIXES[form[2]]


def share_of(value: str | int, whole: int, *, up: bool) -> int:
    """Return a count, or a percentage of `whole` rounded up or down (maxSurge, maxUnavailable)."""
    text = str(value)
    if not text.endswith("%"):
        return int(text)
    exact = whole * int(text[:-1]) / 100
    return math.ceil(exact) if up else math.floor(exact)


# $(NAME) is the value of NAME; $$ is a dollar.
_REFERENCE = re.compile(r"\$(?:\$|\(([A-Za-z_.-][A-Za-z0-9_.-]*)\))")


@dataclass(frozen=True, slots=True)
class PodFacts:
    """The values that a pod reads of itself (fieldRef)."""

    name: str
    namespace: str
    uid: str
    ip: str
    host_ip: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    node: str = "node"
    service_account: str = "default"

    def field(self, path: str) -> str:
        """Return the value at `path`. Raises NoSuchObject for a path that the kubelet does not know."""
        keyed = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path)
        if keyed:
            return (self.labels if keyed[1] == "labels" else self.annotations).get(keyed[2], "")
        known = {
            "metadata.name": self.name,
            "metadata.namespace": self.namespace,
            "metadata.uid": self.uid,
            "spec.nodeName": self.node,
            "spec.serviceAccountName": self.service_account,
            "status.podIP": self.ip,
            "status.podIPs": self.ip,
            "status.hostIP": self.host_ip,
            "status.hostIPs": self.host_ip,
        }
        if path not in known:
            raise NoSuchObject(f"fieldRef {path}: no such field")
        return known[path]


def environment_of(
    container: Manifest, pod: PodFacts, objects: Objects, image: Mapping[str, str]
) -> dict[str, str]:
    result = dict(image)
    for source in container.get("envFrom") or []:
        result |= _all_of(source, pod.namespace, objects)
    for entry in container.get("env") or []:
        value = _value(entry, container, pod, objects)
        if value is not None:
            result[entry["name"]] = expand(value, result) if "value" in entry else value
    return result


def expand(text: str, environment: Mapping[str, str]) -> str:
    def filled(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return "$"
        return environment.get(name, match[0])

    return _REFERENCE.sub(filled, text)


def references_in(container: Manifest) -> set[str]:
    """Return the variables that the container's own spec reads by $(NAME)."""
    texts: list[str] = [*(container.get("command") or []), *(container.get("args") or [])]
    texts += [str(entry["value"]) for entry in container.get("env") or [] if "value" in entry]
    return {match[1] for text in texts for match in _REFERENCE.finditer(text) if match[1]}


def command_of(
    container: Manifest, entrypoint: Sequence[str], cmd: Sequence[str], environment: Mapping[str, str]
) -> list[str]:
    """Return the command: `command` replaces ENTRYPOINT and CMD, `args` replaces CMD."""
    command, args = container.get("command"), container.get("args")
    words = [*command, *(args or [])] if command else [*entrypoint, *(cmd if args is None else args)]
    return [expand(str(word), environment) for word in words]


def _value(entry: Manifest, container: Manifest, pod: PodFacts, objects: Objects) -> str | None:
    source = entry.get("valueFrom")
    if source is None:
        return str(entry.get("value", ""))
    if "fieldRef" in source:
        return pod.field(source["fieldRef"]["fieldPath"])
    if "resourceFieldRef" in source:
        return _resource(source["resourceFieldRef"], container)
    for key, kind in (("secretKeyRef", "Secret"), ("configMapKeyRef", "ConfigMap")):
        if key in source:
            return _key_of(kind, source[key], pod.namespace, objects)
    raise NoSuchObject(f"env {entry['name']}: valueFrom {sorted(source)} is not known")


def _resource(reference: Manifest, container: Manifest) -> str:
    which, _, resource = str(reference["resource"]).partition(".")
    quantity = (container.get("resources") or {}).get(which, {}).get(resource)
    if quantity is None:
        raise NoSuchObject(f"resourceFieldRef {reference['resource']}: the container does not say it")
    return str(math.ceil(amount(quantity) / amount(reference.get("divisor", "1"))))


def _key_of(kind: str, reference: Manifest, namespace: str, objects: Objects) -> str | None:
    data = objects.data(kind, namespace, reference["name"])
    if data is not None and reference["key"] in data:
        return data[reference["key"]].decode()
    if reference.get("optional"):
        return None
    raise NoSuchObject(f"{kind} {reference['name']}: no key {reference['key']!r}")


def _all_of(source: Manifest, namespace: str, objects: Objects) -> dict[str, str]:
    prefix = source.get("prefix", "")
    return {
        prefix + key: value.decode()
        for kind, reference in _references(source)
        for key, value in _data_of(kind, reference, namespace, objects).items()
    }


def _references(source: Manifest) -> Iterator[tuple[str, Manifest]]:
    for key, kind in (("secretRef", "Secret"), ("configMapRef", "ConfigMap")):
        if key in source:
            yield kind, source[key]


def _data_of(kind: str, reference: Manifest, namespace: str, objects: Objects) -> dict[str, bytes]:
    data = objects.data(kind, namespace, reference["name"])
    if data is None and not reference.get("optional"):
        raise NoSuchObject(f"{kind} {reference['name']}: there is none")
    return data or {}
