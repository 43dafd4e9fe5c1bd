"""deploy/k8s: what kubectl and kustomize users get is what the chart renders."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import yaml

from tests.deploy import schemas
from tests.deploy.invariants import hold
from tests.deploy.render import ROOT, Manifest, env_of, pods, render, tool

K8S = ROOT / "deploy" / "k8s"
OVERLAYS = sorted(path.stem for path in (K8S / "values").glob("*.yaml"))


def built(overlay: str) -> list[Manifest]:
    command = [tool("kubectl"), "kustomize", str(K8S / "overlays" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def by_name(manifests: list[Manifest]) -> dict[tuple[str, str], Any]:
    return {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in manifests}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_is_what_the_chart_renders_of_its_values(overlay: str) -> None:
    values = yaml.safe_load((K8S / "values" / f"{overlay}.yaml").read_text())
    manifests = built(overlay)
    rendered = [manifest for manifest in render(values) if manifest["kind"] != "Pod"]
    assert by_name(manifests) == by_name(rendered)
    for manifest in manifests:
        schemas.check(manifest)
    hold([*manifests, *(manifest for manifest in render(values) if manifest["kind"] == "Pod")])


def test_production_refuses_unauthenticated_calls() -> None:
    rendered = built("production")
    gateway = pods(rendered)["gateway"]["containers"][0]
    names = {entry["name"] for entry in gateway["env"]}
    assert {"GALLEY_GATEWAY_API_KEYS_FILE", "GALLEY_GATEWAY_TLS_CERT_FILE"} <= names
    assert "redis" not in pods(rendered)


def test_production_runs_no_model_and_no_image_by_default() -> None:
    """A name without a registry would be looked for on Docker Hub."""
    for name, spec in pods(built("production")).items():
        for container in spec["containers"]:
            assert container["image"].startswith("registry.example.com/galley/"), name
    target = pods(built("production"))["target"]["containers"][0]
    assert env_of(target)["GALLEY_TARGET_MODEL"].startswith("/models/volume/")
