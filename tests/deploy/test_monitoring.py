"""How a deployment is seen: scraping, alerts, dashboards, traces."""

from __future__ import annotations

import json
import os
from unittest.mock import patch

import pytest

from galley.common.tracing.otlp import is_exported
from tests.deploy.render import (
    CHART,
    ROLES,
    Manifest,
    default_values,
    env_of,
    of_kind,
    only_container,
    pod_templates,
    pods,
    render,
    services,
)

MONITORS = ("PodMonitor", "ServiceMonitor")


@pytest.mark.parametrize(
    ("scrape", "annotated", "kinds"),
    [
        ("annotations", True, set()),
        ("podMonitor", False, {"PodMonitor"}),
        ("serviceMonitor", False, {"ServiceMonitor"}),
        ("none", False, set()),
    ],
)
def test_pods_are_scraped_in_one_way(scrape: str, annotated: bool, kinds: set[str]) -> None:
    rendered = render({"monitoring": {"scrape": scrape}})
    assert {manifest["kind"] for manifest in rendered} & set(MONITORS) == kinds
    templates = pod_templates(rendered)
    for role in ROLES:
        annotations = templates[role]["metadata"]["annotations"]
        port = str(default_values()[role]["metricsPort"])
        assert ("prometheus.io/scrape" in annotations) is annotated
        assert annotations.get("prometheus.io/port") == (port if annotated else None)


@pytest.mark.parametrize("kind", MONITORS)
def test_a_monitor_finds_the_metrics_of_each_role_once(kind: str) -> None:
    scrape = kind[0].lower() + kind[1:]
    rendered = render({"monitoring": {"scrape": scrape, "labels": {"release": "prometheus"}}})
    (monitor,) = of_kind(rendered, kind).values()
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    expected = monitor["spec"]["selector"]["matchLabels"].items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints" if kind == "PodMonitor" else "endpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("metrics", "/metrics")
    offering = []
    if kind == "PodMonitor":
        for role, template in pod_templates(rendered).items():
            ports = {port["name"] for port in only_container(template["spec"]).get("ports", [])}
            if expected <= template["metadata"]["labels"].items() and "metrics" in ports:
                offering.append(role)
    else:
        for service in services(rendered).values():
            ports = {port["name"] for port in service["spec"]["ports"]}
            if expected <= service["metadata"]["labels"].items():
                assert "metrics" in ports
                offering.append(service["spec"]["selector"]["app.kubernetes.io/component"])
    assert sorted(offering) == sorted(ROLES)


def test_a_monitor_of_pods_leaves_rays_head_alone() -> None:
    """KubeRay gives it a port `metrics`, which no policy opens."""
    values = {"monitoring": {"scrape": "podMonitor"}, "target": {"kind": "rayservice"}}
    (monitor,) = of_kind(render(values), "PodMonitor").values()
    (chosen,) = monitor["spec"]["selector"]["matchExpressions"]
    assert (chosen["key"], chosen["operator"]) == ("app.kubernetes.io/component", "In")
    assert sorted(chosen["values"]) == sorted(ROLES)


@pytest.mark.parametrize("kind", MONITORS)
def test_a_monitor_names_release_and_pod_in_every_series(kind: str) -> None:
    scrape = kind[0].lower() + kind[1:]
    (monitor,) = of_kind(render({"monitoring": {"scrape": scrape}}, "blue"), kind).values()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints" if kind == "PodMonitor" else "endpoints"]
    assert endpoint["relabelings"] == [
        {"targetLabel": "release", "replacement": "blue"},
        {"targetLabel": "instance", "sourceLabels": ["__meta_kubernetes_pod_name"]},
    ]


def with_dashboards(scrape: str) -> list[Manifest]:
    return render({"monitoring": {"scrape": scrape, "dashboards": {"enabled": True}}})


def test_the_dashboards_are_those_of_the_repository() -> None:
    result: dict[str, object] = {}
    for config in of_kind(with_dashboards("podMonitor"), "ConfigMap").values():
        assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
        result |= {name: json.loads(text) for name, text in config["data"].items()}
    committed = (CHART / "files" / "dashboards").glob("*.json")
    assert result == {path.name: json.loads(path.read_text()) for path in committed}


def test_dashboards_select_by_the_label_that_the_scrape_gives() -> None:
    for config in of_kind(with_dashboards("annotations"), "ConfigMap").values():
        for text in config["data"].values():
            variables = {each["name"]: each for each in json.loads(text)["templating"]["list"]}
            assert variables["release"]["query"]["query"].endswith(", app_kubernetes_io_instance)")
            selected = text.count('app_kubernetes_io_instance=~\\"$release\\"')
            assert selected == text.count("$release") > 10


@pytest.mark.parametrize(
    ("otel", "traces", "metrics"),
    [
        ({}, False, False),
        ({"endpoint": "http://collector.observability:4317"}, True, False),
        ({"endpoint": "http://collector.observability:4317", "metrics": True}, True, True),
    ],
)
def test_traces_are_exported_to_the_endpoint(otel: dict[str, object], traces: bool, metrics: bool) -> None:
    for role, spec in pods(render({"otel": otel})).items():
        if role not in ROLES:
            continue
        given = {name: value for name, value in env_of(only_container(spec)).items() if "OTEL" in name}
        with patch.dict(os.environ, given):
            assert is_exported("traces") is traces
            assert is_exported("metrics") is metrics


def test_one_request_is_sampled_alike_by_all() -> None:
    values = {"otel": {"endpoint": "http://collector.observability:4317", "sampleRatio": 0.25}}
    for role, spec in pods(render(values)).items():
        if role in ROLES:
            given = env_of(only_container(spec))
            assert given["OTEL_TRACES_SAMPLER"] == "parentbased_traceidratio"
            assert given["OTEL_TRACES_SAMPLER_ARG"] == "0.25"
            assert given["OTEL_RESOURCE_ATTRIBUTES"].startswith("k8s.namespace.name=galley,")
