"""Each rule finds what breaks it, in a rendering that kept it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.deploy.linter_rules import RULES, violations
from tests.deploy.matrix import SWITCHES, laid_over
from tests.deploy.render import Manifest, of_kind, render, workloads

Break = Callable[[list[Manifest]], None]
ALL = laid_over(
    [
        SWITCHES["edge"]["ingress"],
        SWITCHES["models"]["hub, by job"],
        SWITCHES["seen"]["services"],
        {"gateway": {"autoscaling": {"enabled": True}}, "target": {"replicas": 2}},
    ]
)


def _the(kind: str, name: str = "") -> Callable[[list[Manifest]], Any]:
    return lambda manifests: next(each for key, each in of_kind(manifests, kind).items() if name in key)[
        "spec"
    ]


def _pod(manifests: list[Manifest], role: str = "gateway") -> Any:
    return workloads(manifests)[role]["spec"]["template"]["spec"]


def _remove_budget(manifests: list[Manifest]) -> None:
    manifests.remove(of_kind(manifests, "PodDisruptionBudget")["galley-draft"])


def _point_elsewhere(manifests: list[Manifest]) -> None:
    for policy in of_kind(manifests, "NetworkPolicy").values():
        for rule in policy["spec"].get("ingress", []):
            for peer in rule.get("from", []):
                labels = peer.get("podSelector", {}).get("matchLabels", {})
                if "app.kubernetes.io/component" in labels:
                    labels["app.kubernetes.io/component"] = "nobody"


BROKEN: dict[str, Break] = {
    "mismatching-selector": lambda made: _the("StatefulSet", "target")(made)["selector"][
        "matchLabels"
    ].update(a="b"),
    "latest-tag": lambda made: _pod(made)["containers"][0].update(
        image="registry.example.com:5000/galley-gateway"
    ),
    "no-readiness-probe": lambda made: _pod(made, "redis")["containers"][0].pop("readinessProbe"),
    "no-rolling-update-strategy": lambda made: _the("Deployment")(made)["strategy"].update(type="Recreate"),
    "no-anti-affinity": lambda made: _pod(made, "target").pop("topologySpreadConstraints"),
    "missingPodDisruptionBudget": _remove_budget,
    "pdb-max-unavailable": lambda made: _the("PodDisruptionBudget")(made).update(maxUnavailable="0%"),
    "pdb-min-available": lambda made: _the("PodDisruptionBudget", "target")(made).update(minAvailable=2),
    "pdb-unhealthy": lambda made: _the("PodDisruptionBudget")(made).pop("unhealthyPodEvictionPolicy"),
    "dangling-ingress": lambda made: _the("Service", "gateway")(made)["ports"][-1].update(name="other"),
    "dangling-servicemonitor": lambda made: _the("ServiceMonitor")(made)["selector"]["matchLabels"].update(
        a="b"
    ),
    "dangling-networkpolicypeer": _point_elsewhere,
    "privileged-ports": lambda made: _pod(made)["containers"][0]["ports"][0].update(containerPort=443),
    "hpaMinAvailability": lambda made: _the("HorizontalPodAutoscaler")(made).update(minReplicas=9),
    "unset-ephemeral-storage": lambda made: _pod(made)["volumes"][0].update(emptyDir={}),
    "job-ttl": lambda made: _the("Job")(made).pop("ttlSecondsAfterFinished"),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_what_breaks_a_rule_is_found(rule: str) -> None:
    manifests = render(ALL)
    assert not violations(manifests)
    BROKEN[rule](manifests)
    (name,) = {line.partition(": ")[0] for line in violations(manifests)}
    assert rule in name


def test_each_rule_has_a_case() -> None:
    assert all(any(case in name for case in BROKEN) for name in RULES)
