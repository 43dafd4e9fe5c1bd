"""What scales the pools: HorizontalPodAutoscalers, and KEDA by what Prometheus says of waiting."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from galley.common.metrics.catalogue import METRICS, SESSIONS_OPEN
from galley.common.metrics.metric import Metric
from services.gateway.settings import GatewaySettings
from tests.deploy import schemas
from tests.deploy.matrix import KEDA, SWITCHES
from tests.deploy.render import ROOT, Manifest, default_values, of_kind, render
from tests.fakes.promql import unknown_names

NOT_INSTALLED = "promtool is not installed"
IN = 'namespace="galley", app_kubernetes_io_instance="galley"'
TRIGGERS = {
    "gateway": ["gateway-open-sessions", "cpu"],
    "draft": ["verify-waits-for-draft", "draft-queue-age"],
    "target": ["target-queue-age", "target-used-blocks"],
}


def scaled_objects(values: Manifest | None = None) -> dict[str, Manifest]:
    result = of_kind(render({"keda": KEDA, **(values or {})}), "ScaledObject")
    return {name.removeprefix("galley-"): scaled["spec"] for name, scaled in result.items()}


def queried(spec: Manifest) -> list[Manifest]:
    """Return the triggers that ask Prometheus."""
    return [trigger for trigger in spec["triggers"] if trigger["type"] == "prometheus"]


def queries(matchers: str = "") -> dict[str, str]:
    keda = {**KEDA, "prometheus": {**KEDA["prometheus"], "matchers": matchers}}
    return {
        trigger["name"]: trigger["metadata"]["query"]
        for spec in scaled_objects({"keda": keda}).values()
        for trigger in queried(spec)
    }


@pytest.mark.parametrize("role", ["gateway", "draft"])
def test_autoscaler_uses_cpu_and_added_metrics(role: str) -> None:
    more = [{"type": "Pods", "pods": {"metric": {"name": "x"}, "target": {"type": "AverageValue"}}}]
    values = {"enabled": True, "minReplicas": 3, "maxReplicas": 5, "metrics": more}
    (scaler,) = of_kind(render({role: {"autoscaling": values}}), "HorizontalPodAutoscaler").values()
    spec = scaler["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (3, 5)
    assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": f"galley-{role}"}
    assert spec["metrics"][0]["resource"]["name"] == "cpu"
    assert spec["metrics"][1:] == more
    assert spec["behavior"]["scaleDown"]["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 60}]


def test_the_autoscaler_of_the_page_is_valid() -> None:
    page = (ROOT / "docs" / "operate" / "scaling.md").read_text()
    (block,) = re.findall(r"```yaml\n(gateway:\n.*?)```", page, re.DOTALL)
    (scaler,) = of_kind(render(yaml.safe_load(block)), "HorizontalPodAutoscaler").values()
    schemas.check(scaler)
    named = scaler["spec"]["metrics"][1]["pods"]["metric"]["name"]
    assert metric(named) is SESSIONS_OPEN
    places = GatewaySettings.model_fields["max_sessions"].default
    wanted = int(scaler["spec"]["metrics"][1]["pods"]["target"]["averageValue"])
    assert wanted / places == pytest.approx(
        default_values()["keda"]["gateway"]["openSessionsShare"], abs=0.01
    )


def test_scaling_is_off_by_default() -> None:
    rendered = render()
    assert not of_kind(rendered, "HorizontalPodAutoscaler")
    assert not of_kind(rendered, "ScaledObject")


def test_pools_scale_by_who_waits_for_them() -> None:
    result = scaled_objects()
    names = {
        role: [trigger.get("name", trigger["type"]) for trigger in spec["triggers"]]
        for role, spec in result.items()
    }
    assert names == TRIGGERS
    for spec in result.values():
        for trigger in queried(spec):
            assert trigger["metadata"]["serverAddress"] == KEDA["prometheus"]["serverAddress"]
    thresholds = [float(trigger["metadata"]["threshold"]) for trigger in result["draft"]["triggers"]]
    defaults = default_values()["keda"]["draft"]
    assert thresholds == [defaults["waitShare"], defaults["queueAgeSeconds"]]


def test_with_prometheus_away_no_pool_shrinks() -> None:
    """A fallback needs AverageValue, and a missing response to count as a failure."""
    for role, spec in scaled_objects().items():
        replicas = default_values()["keda"][role]["fallbackReplicas"]
        assert spec["fallback"] == {
            "failureThreshold": 3,
            "replicas": replicas,
            "behavior": "currentReplicasIfHigher",
        }
        for trigger in queried(spec):
            assert trigger["metricType"] == "AverageValue"
            assert trigger["metadata"]["ignoreNullValues"] == "false"


def test_gateways_scale_by_sessions_and_cpu() -> None:
    """Idle streams cost no CPU, and busy ones no further place: either may be short."""
    own = {"openSessionsShare": 0.5, "targetCPUUtilizationPercentage": 60}
    spec = scaled_objects({"keda": {**KEDA, "gateway": own}})["gateway"]
    assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "galley-gateway"}
    sessions, cpu = spec["triggers"]
    assert sessions["metadata"]["threshold"] == "0.5"
    assert cpu == {"type": "cpu", "metricType": "Utilization", "metadata": {"value": "60"}}
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (2, 8)


@pytest.mark.parametrize(
    ("kind", "api", "of"),
    [
        ("one pod", "apps/v1", "StatefulSet"),
        ("several nodes", "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"),
    ],
)
def test_a_target_is_scaled_whatever_it_is(kind: str, api: str, of: str) -> None:
    reference = scaled_objects(SWITCHES["target"][kind])["target"]["scaleTargetRef"]
    assert reference == {"apiVersion": api, "kind": of, "name": "galley-target"}


def test_a_pool_that_is_not_there_is_not_scaled() -> None:
    assert set(scaled_objects({"draft": {"enabled": False}})) == {"gateway", "target"}
    keda = {**KEDA, "gateway": {"enabled": False}, "target": {"enabled": False}}
    assert set(scaled_objects({"keda": keda})) == {"draft"}


def test_queries_name_only_metrics_that_there_are() -> None:
    for name, query in queries().items():
        assert not list(unknown_names(query)), name
        assert query.count("{") == query.count(IN), "of other deployments too"


def test_queries_select_one_release_of_a_namespace() -> None:
    """By the label that the way of scraping gives, or that the values name."""
    labels = {
        "podMonitor": "release",
        "serviceMonitor": "release",
        "annotations": "app_kubernetes_io_instance",
    }
    for scrape, label in labels.items():
        for named in ("", "galley_release"):
            monitoring = {"scrape": scrape, "releaseLabel": named}
            for spec in scaled_objects({"monitoring": monitoring}).values():
                for trigger in queried(spec):
                    selected = f'{{namespace="galley", {named or label}="galley"'
                    query = trigger["metadata"]["query"]
                    assert query.count("{") == query.count(selected), trigger["name"]


def test_release_labels_come_from_the_values() -> None:
    for query in queries('job="galley"').values():
        assert IN not in query
        assert 'job="galley"' in query


def metric(prometheus: str) -> Metric:
    (result,) = (metric for metric in METRICS if metric.prometheus == prometheus)
    return result


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    everywhere = {"namespace": "galley", "app_kubernetes_io_instance": "galley"}
    actual = ",".join(f'{key}="{value}"' for key, value in {**everywhere, **labels}.items())
    return {"series": f"{name}{{{actual}}}", "values": values}


def histogram(prometheus: str, per_minute: dict[float, int], pod: str) -> list[dict[str, str]]:
    total = 0
    made = []
    for bound in (*metric(prometheus).buckets, float("inf")):
        total += per_minute.get(bound, 0)
        le = "+Inf" if bound == float("inf") else f"{bound:g}"
        made.append(series(f"{prometheus}_bucket", f"0+{total}x10", le=le, pod=pod))
    return [*made, series(f"{prometheus}_count", f"0+{total}x10", pod=pod)]


def busy() -> list[dict[str, str]]:
    """Two drafts and two targets: all queue, and drafts take a quarter of the rounds' time."""
    results = [
        series("galley_verify_draft_wait_seconds_sum", "0+15x10", pod="gateway"),
        series("galley_round_duration_seconds_sum", "0+60x10", pod="gateway"),
        series("galley_sessions_open", "60x10", pod="g"),
        series("galley_sessions_open", "20x10", pod="h"),
    ]
    results += [series("galley_sessions_limit", "64x10", pod=pod) for pod in ("g", "h")]
    for pod in ("a", "b"):
        results += histogram("galley_draft_queue_age_seconds", {0.1: 100}, pod)
        results += histogram("galley_queue_age_seconds", {1.0: 100}, pod)
        results += [series("galley_draft_queue_depth", "3x10", pod=pod)]
        results += [series("galley_queue_depth", "3x10", pod=pod)]
        results += [
            series("galley_kv_blocks", f"{blocks}x10", pod=pod, state=state)
            for state, blocks in {"used": 90, "cached": 8, "free": 2}.items()
        ]
    return results


def idle() -> list[dict[str, str]]:
    still = [{**one, "values": one["values"].replace("+15", "+0").replace("+60", "+0")} for one in busy()]
    return [{**one, "values": one["values"].replace("+100", "+0")} for one in still]


def answers(tmp_path: Path, given: list[dict[str, str]], expected: dict[str, list[float]]) -> None:
    if shutil.which("promtool") is None:
        pytest.skip(NOT_INSTALLED)
    requests: list[dict[str, Any]] = [
        {
            "expr": f"round({query}, 0.001)",
            "eval_time": "8m",
            "exp_samples": [{"labels": "{}", "value": value} for value in expected[name]],
        }
        for name, query in queries().items()
    ]
    file = tmp_path / "tests.yaml"
    test = {"interval": "1m", "input_series": given, "promql_expr_test": requests}
    file.write_text(yaml.safe_dump({"rule_files": [], "tests": [test]}))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()


def test_queries_of_busy_pools(tmp_path: Path) -> None:
    """Each value is one replica's times the number of replicas: KEDA divides by it."""
    answers(
        tmp_path,
        busy(),
        {
            "gateway-open-sessions": [2 * 0.625],
            "verify-waits-for-draft": [0.5],
            "draft-queue-age": [2 * 0.095],
            "target-queue-age": [2 * 0.95],
            "target-used-blocks": [2 * 0.9],
        },
    )


def test_queries_of_idle_pools(tmp_path: Path) -> None:
    expected = {name: [0.0] for name in queries()} | {
        "target-used-blocks": [1.8],
        "gateway-open-sessions": [1.25],
    }
    answers(tmp_path, idle(), expected)


def test_queries_without_series_are_empty(tmp_path: Path) -> None:
    answers(tmp_path, [], {name: [] for name in queries()})
