"""Over all combinations: each variable that the chart sets is read, and each path exists."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache

import pytest

from tests.deploy.matrix import Row, rows, values_of
from tests.deploy.render import ROLES, ROOT, Manifest, pods, render
from tests.deploy.settings_of import parse_env, variables_of
from tests.proofs.boot.environment import PodFacts, environment_of, references_in
from tests.proofs.boot.images import Models, Registry, image_name
from tests.proofs.boot.objects import Objects, secret
from tests.proofs.boot.worlds import NAMESPACE

# Variables that huggingface_hub, OpenTelemetry and Ray read.
_OF_PACKAGES = ("HF_", "OTEL_", "RAY_")
_IDS = ["-".join(row.values()).replace(" ", "_") for row in rows()]
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
def test_services_accept_their_environment(row: Row) -> None:
    for name, _, container in containers(row):
        if runs_a_service(container):
            try:
                parse_env(role_of(container), environment(container))
            except SystemExit:
                pytest.fail(f"{name}/{container['name']} would not start")


@pytest.mark.parametrize("row", rows(), ids=_IDS)
def test_paths_exist_in_the_pod(row: Row) -> None:
    actual = json.dumps(values_of(row))
    for name, spec, container in containers(row):
        values = environment(container)
        for variable in (entry["name"] for entry in container.get("env") or []):
            for path in _PATH.findall(values[variable]):
                assert path in actual or is_there(path, spec, container), (
                    f"{name}/{container['name']}: {variable} names {path}"
                )


def role_of(container: Manifest) -> str:
    """Return the service whose image, or a variant of it, a container runs; empty for others."""
    name = image_name(container["image"])
    return next((role for role in ROLES if name.startswith(f"galley-{role}")), "")


def runs_a_service(container: Manifest) -> bool:
    return not container.get("command")


def unread_variables(container: Manifest) -> set[str]:
    """Return the variables of a container of ours that nothing reads."""
    given = {entry["name"] for entry in container.get("env") or []}
    known = variables_of(role_of(container))
    known |= frozenset() if runs_a_service(container) else _variables_of_commands()
    return {name for name in given - references_in(container) - known if not name.startswith(_OF_PACKAGES)}


@cache
def _variables_of_commands() -> frozenset[str]:
    texts = (path.read_text() for top in ("galley", "services") for path in (ROOT / top).rglob("*.py"))
    return frozenset(name for text in texts for name in re.findall(r'"(GALLEY_[A-Z0-9_]+)"', text))


def containers(row: Row) -> Iterator[tuple[str, Manifest, Manifest]]:
    for name, spec in pods(render(values_of(row))).items():
        for container in [*(spec.get("initContainers") or []), *spec["containers"]]:
            if role_of(container):
                yield name, spec, container


def environment(container: Manifest) -> dict[str, str]:
    secrets: dict[str, dict[str, bytes]] = {}
    for entry in container.get("env") or []:
        reference = entry.get("valueFrom", {}).get("secretKeyRef")
        if reference is not None:
            word = b"redis://store:6379/0" if entry["name"].endswith("REDIS_URL") else b"word"
            secrets.setdefault(reference["name"], {})[reference["key"]] = word
    objects = Objects([secret(name, NAMESPACE, data) for name, data in secrets.items()], NAMESPACE)
    return environment_of(container, _FACTS, objects, _IMAGES.service(role_of(container)).stage.env)


def is_there(path: str, spec: Manifest, container: Manifest) -> bool:
    """Return True if the path is in a mounted volume or in the image."""
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
    items = (volume.get("secret") or volume.get("configMap") or {}).get("items")
    return items is None or path in {item["path"] for item in items}
