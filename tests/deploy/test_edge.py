"""Ways into the cluster: Ingress, routes of the Gateway API, InferencePools."""

from __future__ import annotations

import re
import textwrap

import pytest
import yaml

from galley.common.metrics.catalogue import of_service
from galley.common.metrics.labels import GATEWAY
from galley.common.metrics.metric import Kind
from services.gateway.settings import GatewaySettings
from tests.deploy import schemas
from tests.deploy.matrix import FROM_EDGE, TLS, laid_over
from tests.deploy.render import (
    ROOT,
    Manifest,
    component,
    default_values,
    of_kind,
    pods,
    render,
    render_refused,
    services,
)

HOSTS = ["g.example.com", "other.example.com"]
INGRESS = {"enabled": True, "hosts": HOSTS, "tls": [{"hosts": HOSTS, "secretName": "edge"}]}
ROUTES = {"enabled": True, "parentRefs": [{"name": "edge"}], "hostnames": ["g.example.com"]}
PICKERS = {
    "enabled": True,
    "http": {"endpointPicker": {"name": "picker"}},
    "grpc": {"endpointPicker": {"name": "grpc-picker", "port": 9003, "failureMode": "FailClose"}},
}
ASKS = laid_over([{"tls": TLS}, {"tls": {"gateway": {"clientCaSecretName": "callers"}}}])


def edge(*values: Manifest) -> list[Manifest]:
    return render(laid_over([{"networkPolicy": FROM_EDGE}, *values]))


def named(manifests: list[Manifest], name: str) -> Manifest:
    """Return the one route of that name."""
    (route,) = (
        each
        for each in manifests
        if each["kind"] in ("GRPCRoute", "HTTPRoute") and each["metadata"]["name"] == name
    )
    return route


@pytest.mark.parametrize(
    ("name", "port", "prefix"),
    [("galley-gateway", "grpc", "/galley.v1.Generation/"), ("galley-gateway-http", "http", "/v1/")],
)
def test_an_ingress_passes_on_one_service(name: str, port: str, prefix: str) -> None:
    result = of_kind(edge({"ingress": {**INGRESS, "className": "nginx"}}), "Ingress")[name]
    assert [rule["host"] for rule in result["spec"]["rules"]] == HOSTS
    for rule in result["spec"]["rules"]:
        (path,) = rule["http"]["paths"]
        assert path["path"] == prefix, "health, metrics and reflection stay inside"
        assert path["backend"]["service"] == {"name": "galley-gateway", "port": {"name": port}}
    assert result["spec"]["tls"] == [{"hosts": HOSTS, "secretName": "edge"}]
    assert result["spec"]["ingressClassName"] == "nginx"
    assert "annotations" not in result["metadata"], "no controller is assumed"


def test_an_ingress_has_its_own_annotations() -> None:
    own = {"annotations": {"timeout": "1h"}, "grpc": {"annotations": {"protocol": "h2"}}}
    both = of_kind(edge({"ingress": {**INGRESS, **own}}), "Ingress")
    annotations = {name: each["metadata"]["annotations"] for name, each in both.items()}
    assert annotations == {
        "galley-gateway": {"timeout": "1h", "protocol": "h2"},
        "galley-gateway-http": {"timeout": "1h"},
    }


def test_a_service_of_its_own_carries_the_protocol() -> None:
    own = {"grpc": {"serviceAnnotations": {"protocol": "h2c"}}}
    rendered = edge({"ingress": {**INGRESS, **own}})
    service = services(rendered)["galley-gateway-grpc"]
    assert service["metadata"]["annotations"] == {"protocol": "h2c"}
    assert [port["name"] for port in service["spec"]["ports"]] == ["grpc"]
    backends = {
        name: ingress["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]["name"]
        for name, ingress in of_kind(rendered, "Ingress").items()
    }
    assert backends == {"galley-gateway": "galley-gateway-grpc", "galley-gateway-http": "galley-gateway"}


def test_an_ingress_without_http_is_for_grpc_only() -> None:
    rendered = edge({"ingress": INGRESS, "gateway": {"httpPort": -1}})
    assert list(of_kind(rendered, "Ingress")) == ["galley-gateway"]


def test_an_ingress_must_present_a_certificate_to_a_gateway_that_asks() -> None:
    values = laid_over([ASKS, {"ingress": INGRESS, "networkPolicy": FROM_EDGE, "test": {"enabled": False}}])
    assert "presents no certificate" in render_refused(values).replace("\n", " ")
    key = "nginx.ingress.kubernetes.io/proxy-ssl-secret"
    assert of_kind(edge(values, {"ingress": {"annotations": {key: "galley/proxy"}}}), "Ingress")


def test_a_route_passes_on_the_one_service() -> None:
    parents = [{"name": "public", "namespace": "gateways", "sectionName": "https"}]
    rendered = edge({"gatewayApi": {**ROUTES, "parentRefs": parents}})
    (route,) = of_kind(rendered, "GRPCRoute").values()
    assert not of_kind(rendered, "HTTPRoute"), "without hostnames of its own"
    assert route["spec"]["parentRefs"] == parents
    assert route["spec"]["hostnames"] == ["g.example.com"]
    (rule,) = route["spec"]["rules"]
    assert rule["matches"] == [{"method": {"service": "galley.v1.Generation"}}]
    assert rule["backendRefs"] == [{"name": "galley-gateway", "port": 50051}]


def test_a_route_for_http() -> None:
    http = {"hostnames": ["api.example.com"], "parentRefs": [{"name": "other"}]}
    route = named(edge({"gatewayApi": {**ROUTES, "http": http}}), "galley-gateway-http")
    assert route["spec"]["hostnames"] == ["api.example.com"]
    assert route["spec"]["parentRefs"] == [{"name": "other"}]
    (rule,) = route["spec"]["rules"]
    assert rule == {
        "matches": [{"path": {"type": "PathPrefix", "value": "/v1"}}],
        "timeouts": {"request": "0s"},
        "backendRefs": [{"name": "galley-gateway", "port": 8000}],
    }


@pytest.mark.parametrize(
    ("tls", "policy", "trusted"),
    [
        (
            {},
            {"ca": {"name": "authority"}},
            {"caCertificateRefs": [{"group": "", "kind": "ConfigMap", "name": "authority"}]},
        ),
        (
            {"publicAuthority": True, "name": "g.example.com", "peerSecretName": "peer"},
            {},
            {"wellKnownCACertificates": "System"},
        ),
    ],
    ids=["own authority", "public authority"],
)
def test_the_gateway_checks_the_certificate_of_its_backends(
    tls: Manifest, policy: Manifest, trusted: Manifest
) -> None:
    values = {"tls": TLS, "gatewayApi": {**ROUTES, "backendTlsPolicy": {"enabled": True, **policy}}}
    (rendered,) = of_kind(edge(values, {"tls": {"gateway": tls}}), "BackendTLSPolicy").values()
    assert rendered["spec"]["targetRefs"] == [{"group": "", "kind": "Service", "name": "galley-gateway"}]
    hostname = tls.get("name", "galley-gateway.galley.svc")
    assert rendered["spec"]["validation"] == {"hostname": hostname, **trusted}


def test_pools_hold_the_gateways() -> None:
    rendered = edge({"inferencePool": PICKERS})
    pools = of_kind(rendered, "InferencePool")
    gateways = {name for name in pods(rendered) if name == "gateway"}
    for pool in pools.values():
        selector = pool["spec"]["selector"]["matchLabels"]
        assert selector["app.kubernetes.io/component"] == component(pool) == "gateway"
        assert gateways
    ports = {name: pool["spec"]["targetPorts"] for name, pool in pools.items()}
    assert ports == {"galley-gateway-http": [{"number": 8000}], "galley-gateway-grpc": [{"number": 50051}]}
    assert "appProtocol" not in pools["galley-gateway-http"]["spec"], "older definitions do not know it"
    assert pools["galley-gateway-grpc"]["spec"]["appProtocol"] == "kubernetes.io/h2c"
    assert pools["galley-gateway-grpc"]["spec"]["endpointPickerRef"] == {
        "name": "grpc-picker",
        "port": {"number": 9003},
        "failureMode": "FailClose",
    }
    assert pools["galley-gateway-http"]["spec"]["endpointPickerRef"]["failureMode"] == "FailOpen"


def test_routes_lead_to_the_pools() -> None:
    http = {"hostnames": ["g.example.com"]}
    rendered = edge({"inferencePool": PICKERS, "gatewayApi": {**ROUTES, "http": http}})
    assert not of_kind(rendered, "GRPCRoute"), "a pool is a backend of HTTPRoutes"
    for name, pool, path in (
        ("galley-gateway", "galley-gateway-grpc", "/galley.v1.Generation"),
        ("galley-gateway-http", "galley-gateway-http", "/v1"),
    ):
        (rule,) = named(rendered, name)["spec"]["rules"]
        assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": path}}]
        kind = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": pool}
        assert rule["backendRefs"] == [kind]


def test_one_picker_makes_one_pool() -> None:
    rendered = edge({"inferencePool": {**PICKERS, "grpc": {}}, "gatewayApi": ROUTES})
    assert list(of_kind(rendered, "InferencePool")) == ["galley-gateway-http"]
    (rule,) = named(rendered, "galley-gateway")["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "galley-gateway", "port": 50051}]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ingress": {"enabled": True}}, "ingress.hosts: must name at least one with ingress.enabled"),
        (
            {"ingress": {"enabled": True, "hosts": ["g"]}},
            "ingress.tls: must name at least one with ingress.enabled",
        ),
        ({"ingress": {**INGRESS, "hosts": ["G.example.com"]}}, "/ingress/hosts/0"),
        ({"ingress": {**INGRESS, "hosts": ["*.example.com", "a b"]}}, "/ingress/hosts/1"),
        ({"ingress": {**INGRESS, "hosts": ["g.example.com", "g.example.com"]}}, "/ingress/hosts"),
        ({"gatewayApi": {**ROUTES, "hostnames": ["https://g.example.com"]}}, "/gatewayApi/hostnames/0"),
        (
            {"gatewayApi": {**ROUTES, "hostnames": [], "http": {"hostnames": ["g.example.com"]}}},
            "gatewayApi.hostnames: must name hosts with gatewayApi.http.hostnames",
        ),
        ({"gatewayApi": {**ROUTES, "http": {"hostnames": ["g.example.com"]}}}, "cannot share a hostname"),
        (
            {"gatewayApi": {**ROUTES, "http": {"hostnames": ["h"]}}, "gateway": {"httpPort": -1}},
            "gatewayApi.http.hostnames: must be empty",
        ),
        ({"gatewayApi": {**ROUTES, "backendTlsPolicy": {"enabled": True}}}, "speaks plain text"),
        (
            {"gatewayApi": {**ROUTES, "backendTlsPolicy": {"enabled": True}}, "tls": TLS},
            "gatewayApi.backendTlsPolicy.ca.name: must name",
        ),
        ({"inferencePool": {"enabled": True}}, "inferencePool.http.endpointPicker.name"),
        ({"inferencePool": PICKERS, "tls": TLS}, "inferencePool.enabled: must be false with tls.enabled"),
        ({"inferencePool": PICKERS, "gateway": {"httpPort": -1}}, "closes the HTTP port"),
        (
            {"inferencePool": PICKERS, "networkPolicy": {"clients": []}},
            "networkPolicy.clients: must name callers with inferencePool.enabled",
        ),
        (ASKS, "test.clientCertSecretName: must be set"),
        ({"tls": {**TLS, "gateway": {"secretName": "g", "publicAuthority": True}}}, "tls.gateway.name: must"),
    ],
)
def test_ways_that_cannot_work_are_refused(values: Manifest, message: str) -> None:
    refusal = render_refused(laid_over([{"networkPolicy": FROM_EDGE}, values]))
    assert message in " ".join(refusal.split())


def blocks_of_values() -> list[Manifest]:
    """Return the blocks of the page that are values of the chart."""
    page = (ROOT / "docs" / "operate" / "ingress.md").read_text()
    found = re.findall(r"^ *```yaml\n(.*?)^ *```$", page, re.MULTILINE | re.DOTALL)
    blocks: list[Manifest] = [yaml.safe_load(textwrap.dedent(block)) for block in found]
    return [block for block in blocks if block.keys() <= default_values().keys()]


def test_blocks_of_the_page_render() -> None:
    blocks = blocks_of_values()
    assert len(blocks) >= 8
    first = {"ingress": INGRESS, "gatewayApi": {"parentRefs": [{"name": "edge"}]}}
    for block in blocks:
        has_policy = "backendTlsPolicy" in block.get("gatewayApi", {})
        for manifest in edge(first, block, {"tls": TLS} if has_policy else {}):
            schemas.check(manifest)


def test_body_sizes_of_the_page_exceed_the_largest_message() -> None:
    sizes = [
        value
        for block in blocks_of_values()
        for key, value in block.get("ingress", {}).get("annotations", {}).items()
        if "body-size" in key
    ]
    assert len(sizes) == 2
    largest = GatewaySettings.model_fields["max_message_bytes"].default
    for size in sizes:
        assert int(size.removesuffix("m")) << 20 > largest
    page = (ROOT / "docs" / "operate" / "ingress.md").read_text()
    assert f"{largest >> 20} MiB by default" in page


def test_metrics_for_endpoint_pickers_are_there() -> None:
    """In the form of the model server protocol: a name, and labels without quotes."""
    page = (ROOT / "docs" / "operate" / "ingress.md").read_text()
    specs = re.findall(r"(?:Spec: |-metric=)(galley_\w+)(?:\{(\w+)=(\w+)\})?$", page, re.MULTILINE)
    assert len(specs) == 8
    series = {name: metric for metric in of_service(GATEWAY) for name in metric.series}
    for name, label, value in specs:
        assert series[name].kind in (Kind.GAUGE, Kind.INFO)
        assert label == "" or value in {known.name: known for known in series[name].labels}[label].values
