"""Lists that the API server merges by key: what it refuses is found, in every kind of list and workload."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.deploy.matrix import SWITCHES, laid_over
from tests.deploy.merge_keys import problems
from tests.deploy.render import Manifest, of_kind, pods, render

HUB = laid_over(
    [SWITCHES["models"]["hub, kept"], SWITCHES["draft"]["model"], {"imagePullSecrets": [{"name": "pull"}]}]
)
LISTS_OF_PODS = ("volumes", "imagePullSecrets", "containers", "topologySpreadConstraints")
KINDS = ("StatefulSet", "LeaderWorkerSet", "RayService")
LISTS_OF_CONTAINERS = ("env", "ports", "volumeMounts")


@pytest.mark.parametrize("setting", ["one pod", "several nodes", "ray"])
@pytest.mark.parametrize("name", LISTS_OF_PODS)
def test_a_repeated_entry_of_a_pod_is_found(name: str, setting: str) -> None:
    manifest, spec = _target(setting)
    assert not problems(manifest)
    spec[name].append(copy.deepcopy(spec[name][0]))
    assert name in "".join(problems(manifest))


@pytest.mark.parametrize("name", LISTS_OF_CONTAINERS)
def test_a_repeated_entry_of_a_container_is_found(name: str) -> None:
    manifest, spec = _target()
    entries = spec["containers"][0][name]
    entries.append({**entries[0], "value": "another"} if name == "env" else entries[0])
    assert f"containers[0].{name}: 2 entries" in "".join(problems(manifest))


def test_ports_differ_by_number_and_protocol() -> None:
    manifest, spec = _target()
    ports: list[dict[str, Any]] = spec["containers"][0]["ports"]
    ports.append({**ports[0], "name": "other", "protocol": "TCP"})
    assert "2 entries of containerPort, protocol" in "".join(problems(manifest))
    ports[-1]["protocol"] = "UDP"
    # Helm 3 would overwrite the first with the second.
    (problem,) = problems(manifest)
    assert "2 entries of containerPort (" in problem


def test_ports_of_a_service_differ() -> None:
    service = of_kind(render(), "Service")["galley-gateway"]
    assert not problems(service)
    service["spec"]["ports"].append({**service["spec"]["ports"][0], "name": "again"})
    assert "ports: 2 entries" in "".join(problems(service))


def test_an_entry_without_its_key_is_found() -> None:
    manifest, spec = _target()
    spec["imagePullSecrets"].append({"name": ""})
    spec["containers"][0]["env"].append({"value": "of nothing"})
    text = "".join(problems(manifest))
    assert "imagePullSecrets[1]: no name" in text
    assert ": no name" in text.replace("imagePullSecrets[1]: no name", "")


def _target(setting: str = "one pod") -> tuple[Manifest, Manifest]:
    """Return the workload of targets and the spec of its pods."""
    manifests = render(laid_over([HUB, SWITCHES["target"][setting]]))
    workload = next(
        each for each in manifests if each["kind"] in KINDS and "target" in each["metadata"]["name"]
    )
    return workload, pods([workload])["target"]
