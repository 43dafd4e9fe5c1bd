"""The chart: lint, schema, and what Kubernetes will make of the manifests."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest
import yaml

from services.common.version import __version__
from tests.deploy.render import (
    CHART,
    ROLES,
    HelmFailed,
    Manifest,
    container,
    default_values,
    env,
    helm,
    pod,
    render,
    services,
    workloads,
)

KUBERNETES = "1.37"


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    return render()


def test_lint_is_clean() -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART))


def test_chart_and_code_have_one_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


def test_every_manifest_is_valid(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    kinds = sorted((manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests)
    assert kinds == [
        ("Deployment", "galley-draft"),
        ("Deployment", "galley-gateway"),
        ("Service", "galley-draft"),
        ("Service", "galley-gateway"),
        ("Service", "galley-redis"),
        ("Service", "galley-target"),
        ("StatefulSet", "galley-redis"),
        ("StatefulSet", "galley-target"),
    ]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"gatewy": {}}, "gatewy"),
        ({"gateway": {"replica": 2}}, "replica"),
        ({"gateway": {"settings": {"kk": 2}}}, "kk"),
        ({"gateway": {"port": 80}}, "port"),
        ({"gateway": {"resources": {"request": {}}}}, "request"),
        ({"model": "example/model"}, "draft.settings.model"),
        ({"redis": {"url": "redis://store"}}, "exactly one"),
        ({"redis": {"embedded": {"enabled": False}}}, "exactly one"),
        ({"redis": {"url": "http://store", "embedded": {"enabled": False}}}, "/redis/url"),
    ],
)
def test_wrong_values_are_refused_by_name(values: Manifest, said: str) -> None:
    with pytest.raises(HelmFailed, match=said):
        render(values)


@pytest.mark.parametrize("role", ROLES)
def test_probes_ask_the_health_service_on_the_one_port(manifests: list[Manifest], role: str) -> None:
    port = default_values()[role]["port"]
    spec = container(workloads(manifests)[role])
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert spec[probe]["grpc"] == {"port": port}
    assert [entry["containerPort"] for entry in spec["ports"]] == [port]
    assert [entry["port"] for entry in services(manifests)[role]["spec"]["ports"]] == [port]
    assert env(workloads(manifests)[role])[f"GALLEY_{role.upper()}_PORT"] == str(port)


def test_ports_have_one_truth() -> None:
    ports = {"gateway": 6001, "draft": 6002, "target": 6003}
    rendered = render({role: {"port": port} for role, port in ports.items()})
    gateway = env(workloads(rendered)["gateway"])
    assert gateway["GALLEY_GATEWAY_DRAFT"] == "galley-draft:6002"
    assert env(workloads(rendered)["target"])["GALLEY_TARGET_ADVERTISE"] == "$(POD_IP):6003"
    for role, port in ports.items():
        assert container(workloads(rendered)[role])["livenessProbe"]["grpc"]["port"] == port


@pytest.mark.parametrize("drain", [0, 30, 3600])
def test_kubernetes_waits_longer_than_the_drain(drain: int) -> None:
    rendered = workloads(render({role: {"drainTimeoutSeconds": drain} for role in ROLES}))
    for role in ROLES:
        assert env(rendered[role])[f"GALLEY_{role.upper()}_DRAIN_TIMEOUT_S"] == str(drain)
        assert pod(rendered[role])["terminationGracePeriodSeconds"] > drain + 5


def test_pods_have_no_rights_to_spare(manifests: list[Manifest]) -> None:
    for workload in workloads(manifests).values():
        spec = pod(workload)
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert container(workload)["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_a_service_name_never_becomes_a_setting(manifests: list[Manifest]) -> None:
    """Else the service galley-gateway would set GALLEY_GATEWAY_PORT=tcp://... in every pod."""
    assert all(pod(workload)["enableServiceLinks"] is False for workload in workloads(manifests).values())


def test_every_container_says_what_it_needs(manifests: list[Manifest]) -> None:
    for workload in workloads(manifests).values():
        resources = container(workload)["resources"]
        assert set(resources["requests"]) == {"cpu", "memory"}
        assert "memory" in resources["limits"]


def test_a_writable_place_only_where_one_is_mounted(manifests: list[Manifest]) -> None:
    for role in ROLES:
        spec = workloads(manifests)[role]
        mounted = {mount["name"]: mount["mountPath"] for mount in container(spec)["volumeMounts"]}
        assert mounted == {"tmp": "/tmp", "cache": "/var/cache/galley"}
        assert all("emptyDir" in volume for volume in pod(spec)["volumes"])


def test_the_file_of_api_keys_is_where_the_gateway_is_told() -> None:
    gateway = workloads(render({"gateway": {"apiKeys": {"name": "callers", "key": "k.toml"}}}))["gateway"]
    [mount] = [m for m in container(gateway)["volumeMounts"] if m["name"] == "api-keys"]
    assert env(gateway)["GALLEY_GATEWAY_API_KEYS_FILE"] == f"{mount['mountPath']}/k.toml"
    # As a folder: a file that is mounted alone would never change.
    assert "subPath" not in mount
    assert {"name": "api-keys", "secret": {"secretName": "callers"}} in pod(gateway)["volumes"]


def test_pools_are_reached_at_their_pods(manifests: list[Manifest]) -> None:
    headless = {
        role for role, service in services(manifests).items() if service["spec"].get("clusterIP") == "None"
    }
    assert headless == {"draft", "target", "redis"}


def test_the_trial_store_keeps_an_append_only_file(manifests: list[Manifest]) -> None:
    store = workloads(manifests)["redis"]
    args: list[str] = container(store)["args"]
    assert args[args.index("--appendonly") + 1] == "yes"
    assert store["spec"]["volumeClaimTemplates"][0]["metadata"]["name"] == "data"


@pytest.mark.parametrize(
    ("redis", "source"),
    [
        ({"url": "redis://store:6379/1"}, {"value": "redis://store:6379/1"}),
        (
            {"existingSecret": {"name": "store"}},
            {"valueFrom": {"secretKeyRef": {"name": "store", "key": "url"}}},
        ),
    ],
)
def test_ones_own_store(redis: Manifest, source: dict[str, Any]) -> None:
    rendered = render({"redis": {**redis, "embedded": {"enabled": False}}})
    assert "redis" not in workloads(rendered)
    for role in ("gateway", "target"):
        name = f"GALLEY_{role.upper()}_REDIS_URL"
        entries = container(workloads(rendered)[role])["env"]
        (entry,) = (entry for entry in entries if entry["name"] == name)
        assert entry == {"name": name, **source}


def test_another_release_name_keeps_the_parts_together() -> None:
    rendered = render(release="proof")
    gateway = env(workloads(rendered)["gateway"])
    names = {role: service["metadata"]["name"] for role, service in services(rendered).items()}
    assert names == {role: f"proof-galley-{role}" for role in (*ROLES, "redis")}
    assert "GALLEY_GATEWAY_TARGET" not in gateway, "targets register"
    assert gateway["GALLEY_GATEWAY_REDIS_URL"] == f"redis://{names['redis']}:6379/0"


def test_a_target_registers_under_the_address_of_its_pod() -> None:
    target = workloads(render({"target": {"replicas": 3}}))["target"]
    assert target["spec"]["replicas"] == 3
    names = [entry["name"] for entry in container(target)["env"]]
    assert names.index("POD_IP") < names.index("GALLEY_TARGET_ADVERTISE"), "else it is not filled in"
    (pod_ip,) = (entry for entry in container(target)["env"] if entry["name"] == "POD_IP")
    assert pod_ip["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}


def test_selectors_select_their_own_pods(manifests: list[Manifest]) -> None:
    labels = {
        role: workload["spec"]["template"]["metadata"]["labels"].items()
        for role, workload in workloads(manifests).items()
    }
    for role, service in services(manifests).items():
        selected = {other for other, given in labels.items() if service["spec"]["selector"].items() <= given}
        assert selected == {role}
