"""What the chart renders for all roles, and what values it refuses."""

from __future__ import annotations

import json

import pytest
import yaml

from galley.version import __version__
from tests.deploy.matrix import KEDA, OWN_STORE
from tests.deploy.render import (
    CHART,
    ROLES,
    HelmFailed,
    Manifest,
    container,
    default_values,
    env,
    helm,
    of_kind,
    only_container,
    pod,
    pod_templates,
    pods,
    render,
    render_refused,
    services,
    workloads,
)


def test_a_container_of_podspec_may_have_another_memory_limit() -> None:
    own = {"name": "target", "resources": {"limits": {"memory": "32Gi"}}}
    render({"target": {"settings": {"kv_memory_mb": 8192}, "podSpec": {"containers": [own]}}})


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    return render()


def test_chart_and_code_have_one_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


def test_default_objects(manifests: list[Manifest]) -> None:
    kinds = sorted((manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests)
    assert kinds == [
        ("Deployment", "galley-draft"),
        ("Deployment", "galley-gateway"),
        *(("NetworkPolicy", f"galley-{name}") for name in ("default-deny", "draft", "gateway", "redis")),
        *(("NetworkPolicy", f"galley-{name}") for name in ("target", "test")),
        ("Pod", "galley-test-stream"),
        *(("PodDisruptionBudget", f"galley-{role}") for role in ("draft", "gateway", "target")),
        *(("Service", f"galley-{name}") for name in ("draft", "gateway", "gateway-headless")),
        *(("Service", f"galley-{name}") for name in ("redis", "target")),
        *(("ServiceAccount", f"galley-{role}") for role in ("draft", "gateway", "redis", "target")),
        ("StatefulSet", "galley-redis"),
        ("StatefulSet", "galley-target"),
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gatewy": {}}, "gatewy"),
        ({"gateway": {"replica": 2}}, "replica"),
        ({"gateway": {"settings": {"kk": 2}}}, "kk"),
        *(({role: {"settings": None}}, f"/{role}'?: missing property 'settings'") for role in ROLES),
        ({"target": {"settings": {"tensor_parallel": 2}}}, "tensor_parallel"),
        ({"gateway": {"port": 80}}, "port"),
        ({"gateway": {"resources": {"request": {}}}}, "request"),
        ({"gateway": {"healthPort": 50051}}, "must differ"),
        ({"gateway": {"httpPort": 9101}}, "gateway.httpPort: must differ.*got 9101"),
        ({"gateway": {"httpPort": 0}}, "/gateway/httpPort"),
        ({"gateway": {"settings": {"http_port": 8000}}}, "http_port"),
        ({"target": {"kind": "daemonset"}}, "/target/kind"),
        ({"target": {"gpus": 6, "tensorParallel": 4}}, "/target/gpus.*multiple"),
        ({"target": {"gpus": 8, "tensorParallel": 4}}, "target.gpus: must be 4"),
        (
            {"target": {"kind": "leaderworkerset", "nodes": 2, "gpus": 2, "tensorParallel": 8}},
            "target.gpus: must be 4",
        ),
        (
            {"target": {"kind": "leaderworkerset", "nodes": 3, "tensorParallel": 8}},
            "must be a multiple of target.nodes .3., got 8",
        ),
        ({"target": {"kind": "leaderworkerset"}}, "target.nodes: must be 2 or more"),
        ({"target": {"nodes": 2, "tensorParallel": 2}}, "only target.kind leaderworkerset"),
        ({"target": {"gpus": 1, "settings": {"device": "cpu"}}}, "target.settings.device: must be cuda"),
        ({"target": {"settings": {"device": "cuda:0"}}}, "target.gpus: must be 1 or more"),
        (
            {"target": {"settings": {"kv_memory_mb": 8192}}},
            r"target.settings.kv_memory_mb: must be less than target.resources.limits.memory \(8Gi\)",
        ),
        (
            {"target": {"tensorParallel": 2, "settings": {"kv_memory_mb": 4096}}},
            "for each of the 2 ranks of a pod with target.gpus 0, got 4096",
        ),
        ({"draft": {"settings": {"device": "cuda", "model": "/m"}}}, "draft.gpus: must be 1 or more"),
        (
            {"draft": {"gpus": 1, "settings": {"device": "cpu", "model": "/m"}}},
            "draft.settings.device: must be cuda",
        ),
        ({"draft": {"gpus": 1}}, "draft.gpus: must be 0 without draft.settings.model"),
        ({"draft": {"gpus": 2, "settings": {"model": "/m"}}}, "/draft/gpus"),
        (
            {"target": {"kind": "rayservice", "podDisruptionBudget": {"maxUnavailable": "50%"}}},
            "podDisruptionBudget: must be a number of pods.*got 50%",
        ),
        (
            {"target": {"kind": "rayservice", "rayService": {"rayVersion": ""}}},
            "/rayVersion",
        ),
        ({"target": {"kind": "rayservice", "replicas": 0}}, "target.replicas: must be 1"),
        ({"target": {"kind": "rayservice"}, "keda": KEDA}, "keda.target.enabled=false"),
        ({"draft": {"autoscaling": {"enabled": True}}, "keda": KEDA}, "both scale the draft pool"),
        ({"gateway": {"autoscaling": {"enabled": True}}, "keda": KEDA}, "both scale the gateway pool"),
        ({"monitoring": {"scrape": "none"}, "keda": KEDA}, "monitoring.scrape: must not be none"),
        ({"keda": {"enabled": True}}, "keda.prometheus.serverAddress: must be set with keda.enabled"),
        ({"keda": {**KEDA, "draft": {"minReplicas": 0}}}, "/keda/draft/minReplicas"),
        ({"keda": {**KEDA, "draft": {"minReplicas": 9}}}, "keda.draft.minReplicas: must be at most"),
        ({"gateway": {"autoscaling": {"enabled": True, "minReplicas": 9}}}, "minReplicas: must be at most"),
        ({"gateway": {"podDisruptionBudget": {"minAvailable": 1}}}, "podDisruptionBudget"),
        ({"redis": {"url": "redis://store"}}, "exactly one"),
        ({"redis": {"embedded": {"enabled": False}}}, "exactly one"),
        ({"redis": {"url": "http://store", "embedded": {"enabled": False}}}, "/redis/url"),
        ({"redis": {**OWN_STORE, "url": "redis://u:canary@store"}}, "put the URL into a Secret"),
        ({"redis": {**OWN_STORE, "url": "redis+sentinel://s?sentinel_password=x"}}, "put the URL into"),
        (
            {"redis": {**OWN_STORE, "url": "redis://store:6380"}},
            "redis.ports: must contain port 6380 of redis.url, got 6379",
        ),
        ({"redis": {**OWN_STORE, "url": "redis+sentinel://s1,s2:6379/0?service=a"}}, "port 26379"),
        ({"otel": {"endpoint": "http://collector"}}, "/otel/endpoint"),
        ({"tls": {"enabled": True}}, "tls.gateway.secretName: must be set with tls.enabled"),
        (
            {"tls": {"enabled": True, "gateway": {"secretName": "g"}}},
            "tls.target.secretName: must be set with tls.enabled",
        ),
        (
            {"tls": {"enabled": True, "gateway": {"secretName": "g"}, "target": {"secretName": "t"}}},
            "tls.draft.secretName: must be set with tls.enabled",
        ),
        (
            {"auth": {"jwt": {"enabled": True}}},
            "auth.jwt.issuer: must begin with https:// with auth.jwt.enabled",
        ),
        (
            {"auth": {"jwt": {"enabled": True, "issuer": "https://i"}}},
            "auth.jwt.audience: must be set with auth.jwt.enabled",
        ),
        ({"ingress": {"enabled": True}, "networkPolicy": {"enabled": False}}, "ingress.hosts: must name"),
        (
            {"ingress": {"enabled": True, "hosts": ["g"]}, "networkPolicy": {"enabled": False}},
            "ingress.tls: must name",
        ),
        ({"auth": {"jwt": {"algorithms": ["none"]}}}, "/auth/jwt/algorithms"),
        ({"auth": {"jwt": {"algorithms": ["HS256"]}}}, "/auth/jwt/algorithms"),
        ({"auth": {"jwt": {"jwksUrl": "http://issuer"}}}, "/auth/jwt/jwksUrl"),
        (
            {"ingress": {"enabled": True, "hosts": ["g"], "tls": [{"hosts": ["g"], "secretName": "t"}]}},
            "networkPolicy.clients",
        ),
        (
            {"gatewayApi": {"enabled": True}, "networkPolicy": {"enabled": False}},
            "gatewayApi.parentRefs: must name",
        ),
        ({"gateway": {"service": {"type": "LoadBalancer"}}}, "networkPolicy.clients"),
        ({"networkPolicy": {"prometheus": []}}, "/networkPolicy/prometheus"),
        ({"otel": {"sampleRatio": 2}}, "/otel/sampleRatio"),
    ],
)
def test_wrong_values_are_refused_by_name(values: Manifest, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(render_refused(values).replace("\n", " "))
    assert "canary" not in render_refused(values)


@pytest.mark.parametrize("port", ["healthPort=50051", "metricsPort=50051", "port=8081"])
def test_equal_ports_from_the_command_line_are_refused(port: str) -> None:
    """Helm reads numbers of --set as integers, those of files as floats."""
    with pytest.raises(HelmFailed, match="must differ"):
        helm("template", "galley", str(CHART), "--set", f"gateway.{port}")


@pytest.mark.parametrize("role", ROLES)
def test_probes_ask_the_health_port_natively(manifests: list[Manifest], role: str) -> None:
    values = default_values()[role]
    spec = container(workloads(manifests)[role])
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert spec[probe]["grpc"] == {"port": values["healthPort"]}
    started = env(workloads(manifests)[role])
    prefix = f"GALLEY_{role.upper()}_"
    assert started[f"{prefix}PORT"] == str(values["port"])
    assert started[f"{prefix}HEALTH_PORT"] == str(values["healthPort"])
    assert started[f"{prefix}METRICS_PORT"] == str(values["metricsPort"])
    assert {port["name"]: port["containerPort"] for port in spec["ports"]} == {
        "grpc": values["port"],
        "health": values["healthPort"],
        "metrics": values["metricsPort"],
        **({"http": values["httpPort"]} if role == "gateway" else {}),
    }


@pytest.mark.parametrize("seconds", [1, 600, 1801])
def test_a_slow_start_is_waited_for(seconds: int) -> None:
    rendered = workloads(render({"target": {"startupTimeoutSeconds": seconds}}))
    probe = container(rendered["target"])["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= seconds
    assert env(rendered["gateway"])["GALLEY_GATEWAY_STARTUP_TIMEOUT_S"] == str(seconds)
    waits = container(rendered["gateway"])["startupProbe"]
    allowed = waits["periodSeconds"] * waits["failureThreshold"]
    assert allowed > seconds, "it would be restarted too soon"
    # Kubernetes' own default is 600: `kubectl rollout status` and `helm --wait` would give up on a big model.
    assert rendered["gateway"]["spec"]["progressDeadlineSeconds"] > allowed + 300


def test_a_slow_draft_is_no_failed_roll_out() -> None:
    draft = workloads(render({"draft": {"startupTimeoutSeconds": 900}}))["draft"]
    probe = container(draft)["startupProbe"]
    assert draft["spec"]["progressDeadlineSeconds"] > probe["periodSeconds"] * probe["failureThreshold"] + 300


def test_ports_have_one_truth() -> None:
    ports = {"gateway": 6001, "draft": 6002, "target": 6003}
    given = {role: {"port": port} for role, port in ports.items()}
    rendered = render({**given, "gateway": {"port": 6001, "httpPort": 6004}})
    assert env(workloads(rendered)["gateway"])["GALLEY_GATEWAY_HTTP_PORT"] == "6004"
    assert services(rendered)["galley-gateway"]["spec"]["ports"][1]["port"] == 6004
    assert env(workloads(rendered)["target"])["GALLEY_TARGET_ADVERTISE"] == "$(POD_IP):6003"
    assert env(workloads(rendered)["draft"])["GALLEY_DRAFT_ADVERTISE"] == "$(POD_IP):6002"
    test = only_container(pods(rendered)["test"])
    assert {"name": "GALLEY_ENDPOINT", "value": "galley-gateway:6001"} in test["env"]
    opened = of_kind(rendered, "NetworkPolicy")
    for role, port in ports.items():
        let_in = [each["port"] for each in opened[f"galley-{role}"]["spec"]["ingress"][0]["ports"]]
        assert let_in == [port, *([6004] if role == "gateway" else [])]
        assert services(rendered)[f"galley-{role}"]["spec"]["ports"][0]["port"] == port


@pytest.mark.parametrize(("pause", "drain"), [(0, 0), (5, 30), (600, 3600)])
def test_grace_period_covers_pause_and_drain(pause: int, drain: int) -> None:
    given = {"preStopSeconds": pause, "drainTimeoutSeconds": drain}
    rendered = workloads(render(dict.fromkeys(ROLES, given)))
    for role in ROLES:
        assert env(rendered[role])[f"GALLEY_{role.upper()}_DRAIN_TIMEOUT_S"] == str(drain)
        assert pod(rendered[role])["terminationGracePeriodSeconds"] == pause + drain + 15
        hook = container(rendered[role]).get("lifecycle")
        assert hook == ({"preStop": {"sleep": {"seconds": pause}}} if pause else None)


def test_only_gateways_sleep_before_they_stop(manifests: list[Manifest]) -> None:
    """Endpoints are removed during the sleep; replicas deregister themselves."""
    hooks = {role: "lifecycle" in container(workloads(manifests)[role]) for role in ROLES}
    assert hooks == {"gateway": True, "draft": False, "target": False}


def test_writable_mounts(manifests: list[Manifest]) -> None:
    for role in ROLES:
        spec = workloads(manifests)[role]
        mounted = {mount["name"]: mount["mountPath"] for mount in container(spec)["volumeMounts"]}
        assert mounted == {"tmp": "/tmp", "cache": "/var/cache/galley"}
        assert all("emptyDir" in volume for volume in pod(spec)["volumes"])


def test_pools_are_reached_at_their_pods(manifests: list[Manifest]) -> None:
    """HTTP/2 keeps its connection: through a virtual address all calls would go to one pod."""
    headless = {
        name for name, service in services(manifests).items() if service["spec"].get("clusterIP") == "None"
    }
    assert headless == {"galley-draft", "galley-target", "galley-redis", "galley-gateway-headless"}
    gateway = env(workloads(manifests)["gateway"])
    assert not {"GALLEY_GATEWAY_TARGET", "GALLEY_GATEWAY_DRAFT"} & set(gateway), "both register"


def test_the_trial_store_keeps_an_append_only_file(manifests: list[Manifest]) -> None:
    store = workloads(manifests)["redis"]
    args: list[str] = container(store)["args"]
    assert args[args.index("--appendonly") + 1] == "yes"
    assert args[args.index("--maxmemory-policy") + 1] == "noeviction"
    assert args[args.index("--latency-monitor-threshold") + 1] == "100", "latency doctor would know nothing"
    assert store["spec"]["volumeClaimTemplates"][0]["metadata"]["name"] == "data"
    for probe in ("startupProbe", "readinessProbe"):
        assert "-e" in container(store)[probe]["exec"]["command"], "it would be ready while it loads"


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"memory": "512Mi"}, str(384 * 2**20)),
        ({"memory": "2G"}, "1500000000"),
        ({"memory": "0.5Gi"}, str(384 * 2**20)),
        (None, None),
    ],
)
def test_trial_store_is_full_below_its_memory_limit(limits: Manifest | None, expected: str | None) -> None:
    store = container(workloads(render({"redis": {"embedded": {"resources": {"limits": limits}}}}))["redis"])
    args: list[str] = store["args"]
    assert (args[args.index("--maxmemory") + 1] if "--maxmemory" in args else None) == expected


@pytest.mark.parametrize(
    ("redis", "keys"),
    [
        ({"url": "redis://store:6379/1"}, {}),
        ({"existingSecret": {"name": "store"}}, {"gateway": "url", "draft": "url", "target": "url"}),
        (
            {"existingSecret": {"name": "store", "replicaKey": "less"}},
            {"gateway": "url", "draft": "less", "target": "less"},
        ),
        (
            {"existingSecret": {"name": "store", "replicaKey": "less", "draftKey": "more"}},
            {"gateway": "url", "draft": "more", "target": "less"},
        ),
        (
            {"existingSecret": {"name": "store", "draftKey": "more"}},
            {"gateway": "url", "draft": "more", "target": "url"},
        ),
    ],
)
def test_ones_own_store(redis: Manifest, keys: dict[str, str]) -> None:
    rendered = render({"redis": {**OWN_STORE, **redis}})
    assert "redis" not in workloads(rendered)
    for role in ROLES:
        name = f"GALLEY_{role.upper()}_REDIS_URL"
        entries = container(workloads(rendered)[role])["env"]
        (entry,) = (entry for entry in entries if entry["name"] == name)
        of_secret = {"valueFrom": {"secretKeyRef": {"name": "store", "key": keys.get(role)}}}
        assert entry == {"name": name, **(of_secret if keys else {"value": redis["url"]})}


def test_another_release_name_keeps_the_parts_together() -> None:
    rendered = render(release="proof")
    gateway = env(workloads(rendered)["gateway"])
    assert set(services(rendered)) == {
        "proof-galley-gateway-headless",
        *(f"proof-galley-{role}" for role in (*ROLES, "redis")),
    }
    assert gateway["GALLEY_GATEWAY_REDIS_URL"] == "redis://proof-galley-redis:6379/0"
    test = only_container(pods(rendered)["test"])
    assert {"name": "GALLEY_ENDPOINT", "value": "proof-galley-gateway:50051"} in test["env"]


def test_scheduling_values_of_a_role() -> None:
    given = {
        "nodeSelector": {"pool": "draft"},
        "tolerations": [{"key": "pool", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "spare",
    }
    rendered = workloads(render({"draft": {**given, "gpus": 1, "settings": {"model": "/models/small"}}}))
    draft = pod(rendered["draft"])
    assert {name: draft[name] for name in given} == given
    assert container(rendered["draft"])["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert env(rendered["draft"])["GALLEY_DRAFT_DEVICE"] == "cuda"
    assert not {"nodeSelector", "tolerations", "affinity", "priorityClassName"} & set(pod(rendered["target"]))


def test_pods_of_a_role_are_spread(manifests: list[Manifest]) -> None:
    for role in ROLES:
        template = workloads(manifests)[role]["spec"]["template"]
        (constraint,) = template["spec"]["topologySpreadConstraints"]
        assert constraint["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        assert constraint["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == role


def test_pull_secrets_are_for_every_pod() -> None:
    for name, spec in pods(render({"imagePullSecrets": [{"name": "registry"}]})).items():
        assert spec["imagePullSecrets"] == [{"name": "registry"}], name


def test_new_version_does_not_restart_the_store(manifests: list[Manifest]) -> None:
    for name, template in pod_templates(manifests).items():
        assert name == "test" or "helm.sh/chart" not in template["metadata"]["labels"]
    assert __version__ not in json.dumps(pod_templates(manifests)["redis"])


def test_each_image_can_be_pinned_by_itself() -> None:
    pinned = f"1.2.3@sha256:{'0' * 64}"
    values = {
        "image": {"registry": "registry.example.com/team", "tag": "1.2.3"},
        "target": {"image": {"repository": "galley-target-cuda", "tag": pinned}},
    }
    result = {name: only_container(spec)["image"] for name, spec in pods(render(values)).items()}
    assert result["target"] == f"registry.example.com/team/galley-target-cuda:{pinned}"
    assert result["gateway"] == result["test"] == "registry.example.com/team/galley-gateway:1.2.3"
    assert result["draft"] == "registry.example.com/team/galley-draft:1.2.3"
