"""The environment, command and arguments of a container, as the kubelet makes them of a pod's spec."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.deploy.render import Manifest
from tests.proofs.boot.objects import NoSuchObject, Objects
from tests.proofs.boot.quantities import amount

# $(NAME) is the value of NAME; $$ is a dollar.
_REFERENCE = re.compile(r"\$(?:\$|\(([A-Za-z_.-][A-Za-z0-9_.-]*)\))")


@dataclass(frozen=True, slots=True)
class PodFacts:
    """What a pod is told of itself (fieldRef)."""

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
        """The value at `path`; raises NoSuchObject for one that the kubelet does not know."""
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
    """Variables of `image`, envFrom and env, the later before the earlier. Raises NoSuchObject."""
    found = dict(image)
    for source in container.get("envFrom") or []:
        found |= _all_of(source, pod.namespace, objects)
    for entry in container.get("env") or []:
        value = _value(entry, container, pod, objects)
        if value is not None:
            found[entry["name"]] = expand(value, found) if "value" in entry else value
    return found


def expand(text: str, environment: Mapping[str, str]) -> str:
    """`text` with each $(NAME) that is known filled in."""

    def filled(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return "$"
        return environment.get(name, match[0])

    return _REFERENCE.sub(filled, text)


def references_in(container: Manifest) -> set[str]:
    """The variables that the container's own spec reads, by $(NAME)."""
    texts: list[str] = [*(container.get("command") or []), *(container.get("args") or [])]
    texts += [str(entry["value"]) for entry in container.get("env") or [] if "value" in entry]
    return {match[1] for text in texts for match in _REFERENCE.finditer(text) if match[1]}


def command_of(
    container: Manifest, entrypoint: Sequence[str], cmd: Sequence[str], environment: Mapping[str, str]
) -> list[str]:
    """What is run: `command` takes the place of the image's ENTRYPOINT and CMD, `args` that of its CMD."""
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
