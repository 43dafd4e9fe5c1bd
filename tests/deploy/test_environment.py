"""Every variable that the chart sets is read, every path is there, and nothing required is missing.

Looked up in the code, over combinations of all the chart's switches; the trials then run some of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from tests.deploy.matrix import Row, rows, values_of
from tests.deploy.render import ROOT, Manifest, pods, render
from tests.deploy.settings_of import parse_env
from tests.proofs.boot.environment import PodFacts, environment_of
from tests.proofs.boot.images import Models, Registry
from tests.proofs.boot.objects import Objects, secret
from tests.proofs.boot.readers import role_of, runs_a_service, unread_variables
from tests.proofs.boot.worlds import NAMESPACE

_IDS = ["-".join(row.values()).replace(" ", "_") for row in rows()]
# Wherever they stand in a value: alone, or in a URL.
_PATH = re.compile(r"(?<![\w/:])/(?:etc|models|tmp|var)(?:/[\w.-]+)*")
_LABELS = {
    "leaderworkerset.sigs.k8s.io/worker-index": "0",
    "leaderworkerset.sigs.k8s.io/group-index": "0",
}
_FACTS = PodFacts("pod", NAMESPACE, "uid", "10.0.0.2", "10.0.0.1", _LABELS, {})
_IMAGES = Registry(Models(ROOT, ROOT))


@pytest.mark.parametrize("row", rows(), ids=_IDS)
def test_every_variable_is_read(row: Row) -> None:
    for name, _, container in containers(row):
        assert unread_variables(container) == set(), f"{name}/{container['name']}"


@pytest.mark.parametrize("row", rows(), ids=_IDS)
def test_the_services_take_what_they_are_given(row: Row) -> None:
    for name, _, container in containers(row):
        if runs_a_service(container):
            try:
                parse_env(role_of(container), environment(container))
            except SystemExit:
                pytest.fail(f"{name}/{container['name']} would not start")


@pytest.mark.parametrize("row", rows(), ids=_IDS)
def test_every_path_is_one_that_the_pod_has(row: Row) -> None:
    # What the user of the chart says, he says for pods that he knows.
    told = json.dumps(values_of(row))
    for name, spec, container in containers(row):
        values = environment(container)
        for variable in (entry["name"] for entry in container.get("env") or []):
            for path in _PATH.findall(values[variable]):
                assert path in told or is_there(path, spec, container), (
                    f"{name}/{container['name']}: {variable} names {path}"
                )


def containers(row: Row) -> Iterator[tuple[str, Manifest, Manifest]]:
    """Those of ours, with the pods that they are in."""
    for name, spec in pods(render(values_of(row))).items():
        for container in [*(spec.get("initContainers") or []), *spec["containers"]]:
            if role_of(container):
                yield name, spec, container


def environment(container: Manifest) -> dict[str, str]:
    """With stand-ins for the Secrets that the chart's user makes."""
    secrets: dict[str, dict[str, bytes]] = {}
    for entry in container.get("env") or []:
        reference = entry.get("valueFrom", {}).get("secretKeyRef")
        if reference is not None:
            word = b"redis://store:6379/0" if entry["name"].endswith("REDIS_URL") else b"word"
            secrets.setdefault(reference["name"], {})[reference["key"]] = word
    objects = Objects([secret(name, NAMESPACE, data) for name, data in secrets.items()], NAMESPACE)
    return environment_of(container, _FACTS, objects, _IMAGES.service(role_of(container)).stage.env)


def is_there(path: str, spec: Manifest, container: Manifest) -> bool:
    """In a volume that is mounted there, or in the image."""
    image = _IMAGES.service(role_of(container))
    if any(path == known or path.startswith(f"{known}/") for known in (*image.binds, *image.files)):
        return True
    volumes = {volume["name"]: volume for volume in spec.get("volumes") or []}
    for mount in container.get("volumeMounts") or []:
        within = path.removeprefix(mount["mountPath"]).strip("/")
        if path == mount["mountPath"] or path.startswith(f"{mount['mountPath']}/"):
            return _holds(volumes[mount["name"]], within)
    return False


def _holds(volume: Manifest, path: str) -> bool:
    """A Secret of which only some keys are mounted has no others."""
    items = (volume.get("secret") or volume.get("configMap") or {}).get("items")
    return items is None or path in {item["path"] for item in items}
