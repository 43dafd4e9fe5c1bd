"""Renders the chart and finds things in what comes out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "galley"
ROLES = ("gateway", "draft", "target")

Manifest = dict[str, Any]


class HelmFailed(Exception):
    """helm refused; the message is what it said."""


def helm(*args: str, values: Manifest | None = None) -> str:
    """Run helm on the chart with `values` laid over its own; raises HelmFailed."""
    subprocess.run([sys.executable, str(ROOT / "scripts" / "get_helm.py")], check=True)
    binary = Path(sys.prefix) / "bin" / "helm"
    command = [str(binary), *args, "--values", "-"]
    done = subprocess.run(
        command, input=json.dumps(values or {}), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise HelmFailed(done.stderr)
    return done.stdout


def render(values: Manifest | None = None, release: str = "galley") -> list[Manifest]:
    """Every object that the chart makes."""
    text = helm("template", release, str(CHART), "--namespace", "galley", values=values)
    return [document for document in yaml.safe_load_all(text) if document]


def default_values() -> Manifest:
    """values.yaml."""
    values: Manifest = yaml.safe_load((CHART / "values.yaml").read_text())
    return values


def workloads(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Deployments and StatefulSets by component."""
    kinds = ("Deployment", "StatefulSet")
    return {component(manifest): manifest for manifest in manifests if manifest["kind"] in kinds}


def services(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Services by component."""
    return {component(manifest): manifest for manifest in manifests if manifest["kind"] == "Service"}


def component(manifest: Manifest) -> str:
    """gateway, draft, target or redis."""
    name: str = manifest["metadata"]["labels"]["app.kubernetes.io/component"]
    return name


def pod(workload: Manifest) -> Manifest:
    """The spec of a workload's pods."""
    spec: Manifest = workload["spec"]["template"]["spec"]
    return spec


def container(workload: Manifest) -> Manifest:
    """The one container of a workload's pods."""
    (only,) = pod(workload)["containers"]
    found: Manifest = only
    return found


def env(workload: Manifest) -> dict[str, str]:
    """The environment of a workload's container, where its values are written out."""
    return {entry["name"]: entry.get("value", "") for entry in container(workload).get("env", [])}
