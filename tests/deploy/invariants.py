"""What holds of everything that the chart renders, whatever the values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from tests.deploy import linter_rules, merge_keys
from tests.deploy.render import Manifest, component, of_kind, pod_templates

_WORKLOADS = {"Deployment", "StatefulSet", "LeaderWorkerSet", "RayService"}
_SCALERS = {"HorizontalPodAutoscaler", "ScaledObject"}
_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def hold(manifests: list[Manifest]) -> None:
    names = Counter((manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests)
    assert max(names.values()) == 1, names.most_common(1)
    assert {manifest["metadata"]["namespace"] for manifest in manifests} == {"galley"}
    for manifest in manifests:
        assert not merge_keys.problems(manifest), manifest["metadata"]["name"]
    assert not linter_rules.violations(manifests)
    accounts = of_kind(manifests, "ServiceAccount")
    assert all(account["automountServiceAccountToken"] is False for account in accounts.values())
    for name, template in pod_templates(manifests).items():
        _pod_is_closed(name, template["spec"])
        assert template["spec"]["serviceAccountName"] in accounts
        for container in _containers(template["spec"]):
            _container_is_closed(name, container)
            _is_consistent(name, template["spec"], container)
    _services_lead_somewhere(manifests)
    _policies_cover_all(manifests)
    _budgets_select_pods(manifests)
    _one_scaler_each(manifests)


def _pod_is_closed(name: str, spec: Manifest) -> None:
    assert spec["automountServiceAccountToken"] is False, name
    assert spec["enableServiceLinks"] is False, name
    assert spec.get("hostNetwork") is spec.get("hostPID") is spec.get("hostIPC") is None, name
    context = spec["securityContext"]
    assert context["runAsNonRoot"] is True, name
    # OpenShift sets all three.
    users = {context.get(key) for key in ("runAsUser", "runAsGroup", "fsGroup")}
    assert users in ({10001}, {None}), name
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}, name
    assert not any("hostPath" in volume for volume in spec.get("volumes", [])), name


def _container_is_closed(name: str, container: Manifest) -> None:
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }, name
    resources = container["resources"]
    assert {"cpu", "memory"} <= set(resources["requests"]), name
    assert "memory" in resources["limits"], name
    assert container["imagePullPolicy"], name
    for mount in container["volumeMounts"]:
        inside = mount["mountPath"].startswith(("/etc/galley/", "/models/"))
        assert mount.get("readOnly", False) is inside, f"{name}: {mount}"
        # A file that is mounted alone would never change.
        assert "subPath" not in mount, f"{name}: {mount}"


def _is_consistent(name: str, spec: Manifest, container: Manifest) -> None:
    volumes = [volume["name"] for volume in spec.get("volumes", [])] + ["data"]
    mounts = [mount["name"] for mount in container["volumeMounts"]]
    assert set(mounts) <= set(volumes), name
    assert len({mount["mountPath"] for mount in container["volumeMounts"]}) == len(mounts), name
    variables = Counter(entry["name"] for entry in container.get("env", []))
    assert not variables or max(variables.values()) == 1, f"{name}: {variables.most_common(1)}"
    _references_come_first(name, container)
    ports = {port["containerPort"] for port in container.get("ports", [])}
    named = {port["name"] for port in container.get("ports", [])}
    for probe in (container[kind] for kind in _PROBES if kind in container):
        if "grpc" in probe:
            assert probe["grpc"]["port"] in ports, name
        elif "exec" not in probe:
            assert (probe.get("httpGet") or probe["tcpSocket"])["port"] in named, name


def _references_come_first(name: str, container: Manifest) -> None:
    """Kubernetes expands $(NAME) only if NAME stands before."""
    seen: set[str] = set()
    for entry in container.get("env", []):
        for reference in _references(entry.get("value", "")):
            assert reference in seen, f"{name}: {entry['name']} names {reference}, which comes later"
        seen.add(entry["name"])


def _references(text: str) -> list[str]:
    return [part.split(")")[0] for part in text.split("$(")[1:]]


def _containers(spec: Manifest) -> Iterator[Manifest]:
    yield from spec["containers"]
    yield from spec.get("initContainers", [])


def _selected(manifests: list[Manifest], labels: dict[str, str]) -> set[str]:
    return {
        name
        for name, template in pod_templates(manifests).items()
        if labels.items() <= template["metadata"]["labels"].items()
    }


def _services_lead_somewhere(manifests: list[Manifest]) -> None:
    templates = pod_templates(manifests)
    for name, service in of_kind(manifests, "Service").items():
        chosen = _selected(manifests, service["spec"]["selector"])
        assert chosen, f"{name} selects nothing"
        assert {each.removesuffix("-worker") for each in chosen} == {component(service)}, name
        serving = [each for each in chosen if not each.endswith("-worker")]
        for port in service["spec"]["ports"]:
            for each in serving:
                container = templates[each]["spec"]["containers"][0]
                assert port["targetPort"] in {known["name"] for known in container["ports"]}, name


def _policies_cover_all(manifests: list[Manifest]) -> None:
    policies = of_kind(manifests, "NetworkPolicy")
    if not policies:
        return
    everything = set(pod_templates(manifests))
    denying = policies["galley-default-deny"]["spec"]
    assert denying == {
        "podSelector": denying["podSelector"],
        "policyTypes": ["Ingress", "Egress"],
    }, "it opens something"
    assert _selected(manifests, denying["podSelector"]["matchLabels"]) == everything
    own = [policy["spec"] for name, policy in policies.items() if name != "galley-default-deny"]
    covered = [_selected(manifests, spec["podSelector"]["matchLabels"]) for spec in own]
    assert set().union(*covered) == everything
    for spec in own:
        for rule in [*spec.get("ingress", []), *spec.get("egress", [])]:
            # An empty list would mean everybody.
            assert all(rule[side] for side in ("from", "to", "ports") if side in rule), spec


def _budgets_select_pods(manifests: list[Manifest]) -> None:
    for name, budget in of_kind(manifests, "PodDisruptionBudget").items():
        assert _selected(manifests, budget["spec"]["selector"]["matchLabels"]), name


def _one_scaler_each(manifests: list[Manifest]) -> None:
    workloads = {
        (manifest["kind"], manifest["metadata"]["name"]): manifest["spec"]
        for manifest in manifests
        if manifest["kind"] in _WORKLOADS
    }
    scaled: Counter[Any] = Counter()
    for manifest in manifests:
        if manifest["kind"] in _SCALERS:
            reference = manifest["spec"]["scaleTargetRef"]
            scaled[reference["kind"], reference["name"]] += 1
    for key, times in scaled.items():
        assert times == 1, f"{key} is scaled twice"
        assert "replicas" not in workloads[key], f"{key} would be set back at each upgrade"
    for key, spec in workloads.items():
        assert key in scaled or "replicas" in spec or key[0] == "RayService", key
