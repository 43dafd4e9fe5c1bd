"""NetworkPolicies: closed, but for exactly what the parts need of one another and of the world."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.matrix import JWT, KEDA, OWN_STORE, SWITCHES
from tests.deploy.render import (
    Manifest,
    component,
    default_values,
    of_kind,
    only_container,
    pods,
    render,
    services,
)

GATEWAY, HTTP, DRAFT, TARGET, REDIS = 50051, 8000, 50052, 50053, 6379
HTTPS, DNS, OTLP = 443, 53, 4317
Opening = tuple[str, int]
"""Who is at the other end, a role or another name, and the port; 0 is any."""


def openings(manifests: list[Manifest], role: str, side: str) -> set[Opening]:
    spec = of_kind(manifests, "NetworkPolicy")[f"galley-{role}"]["spec"]
    peers = {"ingress": "from", "egress": "to"}[side]
    results = set()
    for rule in spec.get(side, []):
        for port in rule.get("ports", [{"port": 0}]):
            results |= {(name_of(peer), port["port"]) for peer in rule.get(peers, [{}])}
    return results


def name_of(peer: dict[str, Any]) -> str:
    if not peer:
        return "anywhere"
    if "ipBlock" in peer:
        return str(peer["ipBlock"]["cidr"])
    labels = peer.get("podSelector", {}).get("matchLabels", {})
    if "app.kubernetes.io/component" in labels:
        assert labels["app.kubernetes.io/instance"] == "galley", "another release would get in"
        return str(labels["app.kubernetes.io/component"])
    if "namespaceSelector" not in peer:
        return "this namespace"
    return str(
        labels.get("k8s-app") or next(iter(peer["namespaceSelector"].get("matchLabels", {}).values()), "any")
    )


def test_each_role_reaches_exactly_its_peers() -> None:
    rendered = render()
    seen = {
        role: (openings(rendered, role, "ingress"), openings(rendered, role, "egress"))
        for role in ("gateway", "draft", "target", "redis", "test")
    }
    prometheus, names = "monitoring", ("kube-dns", DNS)
    assert seen == {
        "gateway": (
            {("this namespace", GATEWAY), ("this namespace", HTTP), (prometheus, 9101)},
            {("draft", DRAFT), ("target", TARGET), ("redis", REDIS), names},
        ),
        "draft": ({("gateway", DRAFT), (prometheus, 9102)}, {("redis", REDIS), names}),
        "target": ({("gateway", TARGET), (prometheus, 9103)}, {("redis", REDIS), names}),
        "redis": ({(role, REDIS) for role in ("gateway", "draft", "target")}, set()),
        "test": (set(), {("gateway", GATEWAY), names}),
    }


def test_egress_openings_have_ingress_counterparts() -> None:
    """An opening towards a pod of the release has its counterpart there, and vice versa."""
    for target in SWITCHES["target"].values():
        rendered = render(target)
        roles = {component(policy) for policy in of_kind(rendered, "NetworkPolicy").values()} - {"all"}
        out = {
            (role, peer, port)
            for role in roles
            for peer, port in openings(rendered, role, "egress")
            if peer in roles
        }
        into = {
            (peer, role, port)
            for role in roles
            for peer, port in openings(rendered, role, "ingress")
            if peer in roles
        }
        assert out - into == {("test", "gateway", GATEWAY)}
        assert into <= out


def test_every_port_that_a_service_offers_is_let_in() -> None:
    rendered = render()
    for service in services(rendered).values():
        role = component(service)
        let_in = {port for _, port in openings(rendered, role, "ingress")}
        assert {port["port"] for port in service["spec"]["ports"]} <= let_in, service["metadata"]["name"]


def test_health_ports_are_for_the_node_alone() -> None:
    rendered = render()
    for role in ("gateway", "draft", "target"):
        port = default_values()[role]["healthPort"]
        assert port not in {each for _, each in openings(rendered, role, "ingress")}
        assert all(
            port != entry["port"]
            for service in services(rendered).values()
            for entry in service["spec"]["ports"]
        )


def test_named_callers_and_the_test_are_the_only_ones() -> None:
    clients = [{"ipBlock": {"cidr": "10.1.0.0/16"}}]
    rendered = render({"networkPolicy": {"clients": clients}})
    assert openings(rendered, "gateway", "ingress") == {
        *(("10.1.0.0/16", port) for port in (GATEWAY, HTTP)),
        *(("test", port) for port in (GATEWAY, HTTP)),
        ("monitoring", 9101),
    }


def test_without_http_nothing_of_it_is_open() -> None:
    rendered = render({"gateway": {"httpPort": -1}})
    assert openings(rendered, "gateway", "ingress") == {("this namespace", GATEWAY), ("monitoring", 9101)}
    assert [port["name"] for port in services(rendered)["galley-gateway"]["spec"]["ports"]] == ["grpc"]
    assert "http" not in {port["name"] for port in only_container(pods(rendered)["gateway"])["ports"]}


@pytest.mark.parametrize(
    ("values", "roles"),
    [
        ({}, set()),
        ({"model": "/models/other"}, set()),
        ({"model": "example/big", "draft": {"enabled": False}}, {"gateway", "target"}),
        ({"draft": {"settings": {"model": "example/small"}}}, {"draft"}),
        ({"draft": {"settings": {"model": "/models/d", "target_model": "example/big"}}}, {"draft"}),
        ({"model": "example/big"}, {"gateway", "draft", "target"}),
        (
            {
                "model": "example/big",
                "modelCache": {
                    "persistence": {"enabled": True},
                    "download": {"enabled": True, "mode": "job"},
                },
            },
            {"download"},
        ),
        ({"auth": {"jwt": JWT}}, {"gateway"}),
        ({"auth": {"jwt": {**JWT, "jwksConfigMap": {"name": "keys"}}}}, set()),
    ],
)
def test_only_downloading_roles_reach_https(values: Manifest, roles: set[str]) -> None:
    rendered = render(values)
    there = {"gateway", "draft", "target", "download"} & set(pods(rendered))
    assert {role for role in there if ("0.0.0.0/0", HTTPS) in openings(rendered, role, "egress")} == roles


def test_https_ports_include_a_proxy() -> None:
    values = {
        "model": "example/big",
        "draft": {"settings": {"model": "example/small"}},
        "networkPolicy": {"httpsPorts": [443, 3128]},
    }
    for role in ("gateway", "draft", "target"):
        assert {("0.0.0.0/0", HTTPS), ("0.0.0.0/0", 3128)} <= openings(render(values), role, "egress")


def test_own_store_is_reachable_at_its_ports() -> None:
    redis = {**OWN_STORE, "url": "redis://store:7000/0"}
    to = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "redis"}}}]
    rendered = render({"redis": redis, "networkPolicy": {"redis": {"to": to, "ports": [7000, 17000]}}})
    for role in ("gateway", "draft", "target"):
        assert {("redis", 7000), ("redis", 17000)} <= openings(rendered, role, "egress")
    anywhere = render({"redis": redis, "networkPolicy": {"redis": {"ports": [7000]}}})
    assert ("anywhere", 7000) in openings(anywhere, "gateway", "egress")


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [("http://collector.observability:4317", OTLP), ("https://collector:55681/", 55681)],
)
def test_the_collector_is_reached_at_its_port(endpoint: str, port: int) -> None:
    to = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "observability"}}}]
    rendered = render({"otel": {"endpoint": endpoint}, "networkPolicy": {"otel": {"to": to}}})
    for role in ("gateway", "draft", "target"):
        assert ("observability", port) in openings(rendered, role, "egress")
    assert OTLP not in {each for _, each in openings(render(), "gateway", "egress")}


@pytest.mark.parametrize(
    ("jwt", "ports"),
    [
        ({}, {HTTPS}),
        ({"issuer": "https://login.example.com:8443/realms/a"}, {HTTPS, 8443}),
        ({"jwksUrl": "https://keys.example.com:9443/jwks"}, {HTTPS, 9443}),
    ],
)
def test_an_issuer_is_reached_at_its_port(jwt: Manifest, ports: set[int]) -> None:
    result = openings(render({"auth": {"jwt": {**JWT, **jwt}}}), "gateway", "egress")
    assert {port for peer, port in result if peer == "0.0.0.0/0"} == ports


def test_without_scraping_metrics_are_closed() -> None:
    rendered = render({"monitoring": {"scrape": "none"}})
    assert openings(rendered, "target", "ingress") == {("gateway", TARGET)}


def test_ranks_of_several_pods_reach_one_another_and_of_one_pod_need_not() -> None:
    several = render(SWITCHES["target"]["several nodes"])
    assert ("target", 0) in openings(several, "target", "ingress") & openings(several, "target", "egress")
    alone = render(SWITCHES["target"]["several gpus"])
    assert "target" not in {name for name, _ in openings(alone, "target", "ingress")}


def test_rays_head_and_workers_reach_one_another_and_kuberay_the_head() -> None:
    rendered = render(SWITCHES["target"]["ray"])
    both = {("target", 0), ("ray-head", 0)}
    assert both <= openings(rendered, "target", "ingress") & openings(rendered, "target", "egress")
    assert openings(rendered, "ray-head", "ingress") == {*both, ("kuberay-system", 8265)}
    store = ("anywhere", 6380)
    assert openings(rendered, "ray-head", "egress") == {*both, ("kube-dns", DNS), store}
    forgetful = render({"target": {"kind": "rayservice"}})
    assert openings(forgetful, "ray-head", "egress") == {*both, ("kube-dns", DNS)}


def test_switched_off_there_are_none() -> None:
    assert not of_kind(render({"networkPolicy": {"enabled": False}, "keda": KEDA}), "NetworkPolicy")
