"""Prove the chart on a real API server: `make prove-cluster`.

It uses the first of these that there is: the context that CONTEXT names, with images from REGISTRY; a cluster
that kind makes, with the images that docker has; an API server alone, from kube-apiserver and etcd in
KUBEBUILDER_ASSETS. A server with nodes installs, tests, upgrades, scales, kills and uninstalls a release.
Every server says which renderings of the chart it accepts, under the restricted Pod Security Standard.

Exit status: 0 if all held, 1 if not, 3 if there is no server to prove it on.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Sequence
from typing import Any

import yaml

from bench.harness import BENCH, result_path, write_record
from tests.deploy.render import CHART, Manifest
from tests.proofs.cluster import acceptance
from tests.proofs.cluster.commands import Failed
from tests.proofs.cluster.life import Life
from tests.proofs.cluster.servers import NoServer, Server, server

NO_SERVER = 3
_LEVEL = "pod-security.kubernetes.io"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.proofs.cluster", description=__doc__)
    parser.add_argument("--context", default="", help="a context of the kubeconfig")
    parser.add_argument("--registry", default="", help="the images' registry, for --context")
    given = parser.parse_args(argv)
    version = str(yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"])
    try:
        with server(given.context, version, os.environ) as found:
            record = prove(found, given.registry, acceptance.renderings())
    except NoServer as reason:
        print(f"cannot prove it here, for there is no API server:\n{reason}")
        return NO_SERVER
    path = result_path("cluster", BENCH / "results")
    write_record(path, record)
    print(f"{'held' if record['held'] else 'NOT held'}; record: {path}")
    return 0 if record["held"] else 1


def prove(found: Server, registry: str, all_values: dict[str, Manifest]) -> dict[str, Any]:
    """Return the record of a proof in a namespace of its own, which is removed. Raises Failed without one."""
    namespace = f"galley-proof-{secrets.token_hex(3)}"
    commands = found.commands
    try:
        commands.kubectl("create", "namespace", namespace)
        commands.kubectl(
            "label", "namespace", namespace, f"{_LEVEL}/enforce=restricted", f"{_LEVEL}/warn=restricted"
        )
        refused = acceptance.problems(commands, namespace, all_values)
        steps = Life(commands, namespace, {"image": {"registry": registry}}).run() if found.has_nodes else []
    finally:
        _remove(found, namespace)
    held = not refused and not any(step["problem"] for step in steps)
    return {
        "server": found.name,
        "version": commands.kubectl("version", "--output=yaml")[0],
        "refused": refused,
        "steps": steps,
        "held": held,
    }


def _remove(found: Server, namespace: str) -> None:
    try:
        found.commands.kubectl(
            "delete", "namespace", namespace, "--ignore-not-found", f"--wait={found.has_nodes}".lower()
        )
    except Failed as failure:
        print(f"namespace {namespace} is left: {failure}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
