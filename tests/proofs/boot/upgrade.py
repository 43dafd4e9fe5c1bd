"""`helm upgrade` from an earlier chart: objects are replaced, and all workloads that changed roll at once."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.render import CHART, ROOT, Manifest, tool
from tests.proofs.boot.cluster import Cluster, ClusterFailed
from tests.proofs.boot.objects import GROUPS, WORKLOAD_KINDS
from tests.proofs.boot.rollouts import roll

# What the API server lets nobody change, by kind.
_MUTABLE_OF_SETS = {
    *(
        "minReadySeconds",
        "ordinals",
        "persistentVolumeClaimRetentionPolicy",
        "replicas",
        "revisionHistoryLimit",
    ),
    *("template", "updateStrategy"),
}
Key = tuple[str, str]


def earlier_revision() -> str:
    """Return the commit before the last one that changed the chart."""
    chart = str(CHART.relative_to(ROOT))
    changed = _git("log", "-1", "--format=%H", "--", chart).decode().strip()
    return _git("rev-parse", f"{changed}~1").decode().strip()


def rendered_at(revision: str, folder: Path, values: Manifest) -> list[Manifest]:
    """Return what the chart of a revision renders."""
    chart = str(CHART.relative_to(ROOT))
    with tarfile.open(fileobj=io.BytesIO(_git("archive", revision, chart))) as archive:
        archive.extractall(folder, filter="data")
    command = [
        tool("helm"),
        "template",
        "galley",
        str(folder / chart),
        "--namespace",
        "galley",
        "--values",
        "-",
    ]
    done = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=True)
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout


async def upgrade(cluster: Cluster, before: Sequence[Manifest], after: Sequence[Manifest]) -> list[str]:
    """Upgrade; return the workloads that rolled. Raises ClusterFailed for what an API server would refuse."""
    old, new = {_key(each): each for each in before}, {_key(each): each for each in after}
    refused = [line for key in old.keys() & new.keys() for line in immutable_changes(old[key], new[key])]
    gone = [old[key] for key in old.keys() - new.keys()]
    refused += [
        f"{each['kind']} {each['metadata']['name']}: goes" for each in gone if each["kind"] in WORKLOAD_KINDS
    ]
    if refused:
        raise ClusterFailed(f"the upgrade is refused: {refused}")
    cluster.apply(list(after), gone)
    changed = [
        manifest["metadata"]["name"]
        for key, manifest in new.items()
        if manifest["kind"] in WORKLOAD_KINDS and _template(old[key]) != _template(manifest)
    ]
    await asyncio.gather(*(roll(cluster, name) for name in changed))
    return changed


def immutable_changes(old: Manifest, new: Manifest) -> Iterator[str]:
    """Yield the fields that differ and may not."""
    before, after = old.get("spec") or {}, new.get("spec") or {}
    match old["kind"]:
        case "StatefulSet":
            fixed = (before.keys() | after.keys()) - _MUTABLE_OF_SETS
        case "Deployment":
            fixed = {"selector"}
        case "Service":
            fixed = {"clusterIP"}
        case kind if kind == GROUPS:
            fixed = {"leaderWorkerTemplate"}
        case _:
            fixed = set()
    for field in sorted(fixed):
        if before.get(field) != after.get(field):
            yield f"{old['kind']} {old['metadata']['name']}: {field}"


def _key(manifest: Manifest) -> Key:
    return manifest["kind"], manifest["metadata"]["name"]


def _template(manifest: Manifest) -> Any:
    return manifest["spec"].get("template")
