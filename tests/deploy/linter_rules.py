"""Rules of kube-linter and Polaris, which no package registry has, as checks of what the chart renders.

invariants.py and merge_keys.py hold those about privileges, host access, service accounts, requests,
Secrets in variables, network policies, Services and repeated variables. Here are the others, by the names
that the programs use.

Left out, each for a reason: CPU limits (a throttled pod stalls all its streams), digests and `pullPolicy:
Always` (users choose the registry and the build), Secrets in variables (the store's URL is read once),
three replicas, priority classes, node affinity, owner labels and e-mail annotations (the cluster's own
policy), NodePort and LoadBalancer (a switch), ephemeral-storage requests (every emptyDir has a size limit),
`ndots` of the DNS config (the cluster's own policy), a `name` label equal to the object's name (a release
has several).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.deploy.render import ROLES, Manifest, component, of_kind, pod_templates, services

_WORKLOADS = ("Deployment", "StatefulSet", "LeaderWorkerSet", "RayService")
_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
_ROUTES = ("GRPCRoute", "HTTPRoute")
_FIRST_UNPRIVILEGED_PORT = 1024
_RELEASE = "app.kubernetes.io/instance"
# The leader probes for its group; download and test end by themselves; nobody calls the pod that learns.
_UNPROBED = {"target-worker", "download", "test", "learning"}
# One pod by design: the trial store, the head of Ray, the download, the test, the pod that learns.
_SINGLE = {"redis", "ray-head", "download", "test", "learning"}


def violations(manifests: list[Manifest]) -> list[str]:
    """Return what breaks a rule: its name, the object, and what is wrong, one line each."""
    return [f"{name}: {problem}" for name, rule in RULES.items() for problem in rule(manifests)]


def _mismatching_selector(manifests: list[Manifest]) -> Iterator[str]:
    for kind in ("Deployment", "StatefulSet"):
        for name, workload in of_kind(manifests, kind).items():
            spec = workload["spec"]
            if not spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items():
                yield f"{kind} {name}"


def _latest_tag(manifests: list[Manifest]) -> Iterator[str]:
    for name, container in _containers(manifests):
        _, _, tag = container["image"].rpartition("/")[2].partition(":")
        if tag in ("", "latest"):
            yield f"{name}: {container['image']}"


def _missing_probe(manifests: list[Manifest]) -> Iterator[str]:
    for name, template in pod_templates(manifests).items():
        # Those that a user adds are the user's.
        main = template["spec"]["containers"][0]
        if name not in _UNPROBED:
            yield from (f"{name}: no {probe}" for probe in _PROBES if probe not in main)


def _no_rolling_update_strategy(manifests: list[Manifest]) -> Iterator[str]:
    for name, workload in of_kind(manifests, "Deployment").items():
        strategy = workload["spec"].get("strategy", {})
        # Nobody calls the pod that learns, and two of them would write into one directory.
        if component(workload) != "learning" and strategy.get("type", "RollingUpdate") != "RollingUpdate":
            yield f"{name}: {strategy['type']}"


def _no_spread(manifests: list[Manifest]) -> Iterator[str]:
    for name, template in pod_templates(manifests).items():
        spec = template["spec"]
        if name not in _SINGLE and not spec.get("topologySpreadConstraints") and not spec.get("affinity"):
            yield name


def _missing_budget(manifests: list[Manifest]) -> Iterator[str]:
    budgets = of_kind(manifests, "PodDisruptionBudget").values()
    for name, template in pod_templates(manifests).items():
        labels = template["metadata"]["labels"].items()
        selected = (each["spec"]["selector"]["matchLabels"].items() <= labels for each in budgets)
        if name in ROLES and not any(selected):
            yield name


def _blocking_budget(manifests: list[Manifest]) -> Iterator[str]:
    replicas = {
        component(each): each["spec"].get("replicas") for each in manifests if each["kind"] in _WORKLOADS
    }
    for name, budget in of_kind(manifests, "PodDisruptionBudget").items():
        spec = budget["spec"]
        if spec.get("unhealthyPodEvictionPolicy") != "AlwaysAllow":
            yield f"{name}: a pod that is not ready blocks a drain"
        if spec.get("maxUnavailable") in (0, "0%") or spec.get("minAvailable") == "100%":
            yield f"{name}: no pod may ever be evicted"
        least, most = spec.get("minAvailable"), replicas.get(component(budget))
        if isinstance(least, int) and isinstance(most, int) and least >= most:
            yield f"{name}: {least} of {most} must stay"


def _dangling_backend(manifests: list[Manifest]) -> Iterator[str]:
    known = {
        (name, key)
        for name, service in services(manifests).items()
        for port in service["spec"]["ports"]
        for key in (port["name"], port["port"])
    }
    for kind, name, service, port in _backends(manifests):
        if (service, port) not in known:
            yield f"{kind} {name}: no port {port} of a Service {service}"


def _backends(manifests: list[Manifest]) -> Iterator[tuple[str, str, str, Any]]:
    for name, ingress in of_kind(manifests, "Ingress").items():
        for rule in ingress["spec"]["rules"]:
            for path in rule["http"]["paths"]:
                service = path["backend"]["service"]
                yield "Ingress", name, service["name"], next(iter(service["port"].values()))
    for kind in _ROUTES:
        for name, route in of_kind(manifests, kind).items():
            for rule in route["spec"]["rules"]:
                for backend in rule["backendRefs"]:
                    if backend.get("kind", "Service") == "Service":
                        yield kind, name, backend["name"], backend["port"]


def _dangling_monitor(manifests: list[Manifest]) -> Iterator[str]:
    for name, monitor in of_kind(manifests, "ServiceMonitor").items():
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        if not any(wanted <= each["metadata"]["labels"].items() for each in services(manifests).values()):
            yield f"ServiceMonitor {name}"
    for name, monitor in of_kind(manifests, "PodMonitor").items():
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        templates = pod_templates(manifests).values()
        if not any(wanted <= each["metadata"]["labels"].items() for each in templates):
            yield f"PodMonitor {name}"


def _dangling_peer(manifests: list[Manifest]) -> Iterator[str]:
    """Peers that are pods of this release must be."""
    templates = pod_templates(manifests).values()
    for name, policy in of_kind(manifests, "NetworkPolicy").items():
        rules = [*policy["spec"].get("ingress", []), *policy["spec"].get("egress", [])]
        for peer in (peer for rule in rules for side in ("from", "to") for peer in rule.get(side, [])):
            wanted = peer.get("podSelector", {}).get("matchLabels", {})
            if _RELEASE in wanted and not any(
                wanted.items() <= each["metadata"]["labels"].items() for each in templates
            ):
                yield f"{name}: {wanted}"


def _privileged_ports(manifests: list[Manifest]) -> Iterator[str]:
    for name, container in _containers(manifests):
        for port in container.get("ports", []):
            if port["containerPort"] < _FIRST_UNPRIVILEGED_PORT or "hostPort" in port:
                yield f"{name}: {port}"


def _autoscaler_bounds(manifests: list[Manifest]) -> Iterator[str]:
    for name, scaler in of_kind(manifests, "HorizontalPodAutoscaler").items():
        if not 1 <= scaler["spec"]["minReplicas"] <= scaler["spec"]["maxReplicas"]:
            yield name


def _unbounded_empty_dir(manifests: list[Manifest]) -> Iterator[str]:
    for name, template in pod_templates(manifests).items():
        for volume in template["spec"].get("volumes", []):
            if "emptyDir" in volume and "sizeLimit" not in volume["emptyDir"]:
                yield f"{name}: {volume['name']}"


def _endless_job(manifests: list[Manifest]) -> Iterator[str]:
    for name, job in of_kind(manifests, "Job").items():
        hook = "helm.sh/hook-delete-policy" in job["metadata"].get("annotations", {})
        if not hook and "ttlSecondsAfterFinished" not in job["spec"]:
            yield name


def _containers(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    for name, template in pod_templates(manifests).items():
        for container in (*template["spec"]["containers"], *template["spec"].get("initContainers", [])):
            yield name, container


RULES: dict[str, Callable[[list[Manifest]], Iterator[str]]] = {
    "mismatching-selector": _mismatching_selector,
    "latest-tag": _latest_tag,
    "no-liveness-probe, no-readiness-probe, no-startup-probe": _missing_probe,
    "no-rolling-update-strategy": _no_rolling_update_strategy,
    "no-anti-affinity, topologySpreadConstraint": _no_spread,
    "missingPodDisruptionBudget": _missing_budget,
    "pdb-max-unavailable, pdb-min-available, pdb-unhealthy-pod-eviction-policy": _blocking_budget,
    "dangling-ingress": _dangling_backend,
    "dangling-servicemonitor": _dangling_monitor,
    "dangling-networkpolicypeer-podselector": _dangling_peer,
    "privileged-ports, ssh-port, hostPortSet": _privileged_ports,
    "hpaMinAvailability, hpaMaxAvailability": _autoscaler_bounds,
    "unset-ephemeral-storage-requirements": _unbounded_empty_dir,
    "job-ttl-seconds-after-finished": _endless_job,
}
