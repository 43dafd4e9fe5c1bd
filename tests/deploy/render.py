"""Renders the chart and finds things in what comes out."""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "deploy" / "locks"
# The extra of galley that each image installs; a target may be sharded over ranks, which Ray places.
EXTRAS = {"gateway": "gateway", "draft": "draft", "target": "ray"}
_ENTRY = re.compile(r"^(\S+)==(\S+)(?: \\\n +--hash=\S+)+$", re.MULTILINE)
CHART = ROOT / "helm" / "galley"
ROLES = ("gateway", "draft", "target")
EXAMPLES = tuple(sorted((CHART / "examples").glob("*.yaml")))

Manifest = dict[str, Any]
# The C loader is ten times as fast.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class HelmFailed(Exception):
    """helm refused; the message is its output."""


@functools.cache
def tool(name: str) -> str:
    """Return the path of helm or kubectl, fetched if needed."""
    subprocess.run([ROOT / "scripts" / "get_helm.sh"], env={**os.environ, "VENV": sys.prefix}, check=True)
    return str(Path(sys.prefix) / "bin" / name)


def helm(*args: str, values: Manifest | None = None) -> str:
    """Run helm on the chart with `values`. Raises HelmFailed."""
    command = [tool("helm"), *args, "--values", "-"]
    done = subprocess.run(
        command, input=json.dumps(values or {}), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise HelmFailed(done.stderr)
    return done.stdout


@functools.cache
def _rendered(values: str, release: str) -> list[Manifest]:
    text = helm("template", release, str(CHART), "--namespace", "galley", values=json.loads(values))
    return [document for document in yaml.load_all(text, Loader=_LOADER) if document]


def render(values: Manifest | None = None, release: str = "galley") -> list[Manifest]:
    """Return every object that the chart makes, the pod of `helm test` included. Results are cached."""
    return copy.deepcopy(_rendered(json.dumps(values or {}, sort_keys=True), release))


def render_refused(values: Manifest) -> str:
    """Return why helm refuses these values. Raises AssertionError if it does not."""
    try:
        render(values)
    except HelmFailed as refusal:
        return str(refusal)
    raise AssertionError(f"helm takes {values}")


def default_values() -> Manifest:
    values: Manifest = yaml.safe_load((CHART / "values.yaml").read_text())
    return values


def example(name: str) -> Manifest:
    values: Manifest = yaml.safe_load((CHART / "examples" / f"values-{name}.yaml").read_text())
    return values


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {manifest["metadata"]["name"]: manifest for manifest in manifests if manifest["kind"] == kind}


def workloads(manifests: list[Manifest]) -> dict[str, Manifest]:
    kinds = ("Deployment", "StatefulSet")
    return {component(manifest): manifest for manifest in manifests if manifest["kind"] in kinds}


def services(manifests: list[Manifest]) -> dict[str, Manifest]:
    return of_kind(manifests, "Service")


def component(manifest: Manifest) -> str:
    """Return the role of an object, followed by its pool if the role has several."""
    labels: dict[str, str] = manifest["metadata"]["labels"]
    pool = labels.get("galley-pool")
    return labels["app.kubernetes.io/component"] + (f"-{pool}" if pool else "")


def pod_templates(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Return everything that becomes a pod, with metadata and spec, by a unique name."""
    result: dict[str, Manifest] = {}
    for manifest in manifests:
        spec = manifest.get("spec", {})
        match manifest["kind"]:
            case "Deployment" | "StatefulSet":
                result[component(manifest)] = spec["template"]
            case "LeaderWorkerSet":
                result["target"] = spec["leaderWorkerTemplate"]["leaderTemplate"]
                result["target-worker"] = spec["leaderWorkerTemplate"]["workerTemplate"]
            case "RayService":
                cluster = spec["rayClusterConfig"]
                result["ray-head"] = cluster["headGroupSpec"]["template"]
                (workers,) = cluster["workerGroupSpecs"]
                result["target"] = workers["template"]
            case "Job":
                result[component(manifest)] = spec["template"]
            case "Pod":
                result["test"] = manifest
    return result


def pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    return {name: template["spec"] for name, template in pod_templates(manifests).items()}


def pod(workload: Manifest) -> Manifest:
    spec: Manifest = workload["spec"]["template"]["spec"]
    return spec


def only_container(spec: Manifest) -> Manifest:
    (only,) = spec["containers"]
    result: Manifest = only
    return result


def container(workload: Manifest) -> Manifest:
    return only_container(pod(workload))


def env_of(spec: Manifest) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in spec.get("env", [])}


def env(workload: Manifest) -> dict[str, str]:
    return env_of(container(workload))


def locked(text: str) -> dict[str, str]:
    """Return the entries of a lock by name, with versions and hashes."""
    return {entry[1]: entry[0] for entry in _ENTRY.finditer(text)}
