"""Extension points: every pod of the chart takes them, and they replace what the chart renders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.deploy import schemas
from tests.deploy.matrix import laid_over
from tests.deploy.render import (
    ROLES,
    Manifest,
    env_of,
    pod_templates,
    pods,
    render,
    render_refused,
    workloads,
)

GROUP = {"kind": "leaderworkerset", "nodes": 2, "tensorParallel": 2}
RAY = {"kind": "rayservice"}
TARGETS: list[dict[str, Any]] = [{}, GROUP, RAY]
KINDS = ["one pod", "a group", "ray"]
DOWNLOADED = {
    "model": "example/big",
    "draft": {"settings": {"model": "example/small"}},
    "modelCache": {"download": {"enabled": True}},
}


def on_every_pod(extension: Manifest, target: Manifest) -> dict[str, Manifest]:
    """Return every pod with its metadata, each part of the values that configures one having `extension`."""
    head = {"head": extension}
    manifests = render(
        {
            "networkPolicy": {"enabled": not extension.get("hostNetwork")},
            "gateway": extension,
            "draft": extension,
            "target": {**extension, **target, "rayService": head},
            "redis": {"embedded": extension},
            "test": extension,
        }
    )
    for manifest in manifests:
        schemas.check(manifest)
    return pod_templates(manifests)


def main(template: Manifest) -> Manifest:
    container: Manifest = template["spec"]["containers"][0]
    return container


MOUNT = {"name": "more", "mountPath": "/more"}
EXTENSIONS: dict[str, tuple[Manifest, Callable[[Manifest], bool]]] = {
    "podLabels": (
        {"podLabels": {"team": "serving"}},
        lambda each: each["metadata"]["labels"]["team"] == "serving",
    ),
    "extraEnv": (
        {"extraEnv": [{"name": "MORE", "value": "1"}]},
        lambda each: env_of(main(each))["MORE"] == "1",
    ),
    "envFrom": (
        {"envFrom": [{"secretRef": {"name": "more"}}]},
        lambda each: main(each)["envFrom"] == [{"secretRef": {"name": "more"}}],
    ),
    "extraVolumes": (
        {"extraVolumes": [{"name": "more", "emptyDir": {}}], "extraVolumeMounts": [MOUNT]},
        lambda each: (
            {"name": "more", "emptyDir": {}} in each["spec"]["volumes"]
            and MOUNT in main(each)["volumeMounts"]
        ),
    ),
    "extraContainers": (
        {"extraContainers": [{"name": "proxy", "image": "proxy:1"}]},
        lambda each: each["spec"]["containers"][1:] == [{"name": "proxy", "image": "proxy:1"}],
    ),
    "initContainers": (
        {"initContainers": [{"name": "wait", "image": "busybox:1"}]},
        lambda each: each["spec"]["initContainers"] == [{"name": "wait", "image": "busybox:1"}],
    ),
    "podSecurityContext": (
        {"podSecurityContext": {"supplementalGroups": [44], "runAsUser": None}},
        lambda each: (
            each["spec"]["securityContext"]["supplementalGroups"] == [44]
            and "runAsUser" not in each["spec"]["securityContext"]
            and each["spec"]["securityContext"]["runAsNonRoot"]
        ),
    ),
    "securityContext": (
        {"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}},
        lambda each: main(each)["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]},
    ),
    "runtimeClassName": (
        {"runtimeClassName": "nvidia"},
        lambda each: each["spec"]["runtimeClassName"] == "nvidia",
    ),
    "schedulerName": ({"schedulerName": "kueue"}, lambda each: each["spec"]["schedulerName"] == "kueue"),
    "hostNetwork": (
        {"hostNetwork": True},
        lambda each: each["spec"]["hostNetwork"] and each["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet",
    ),
    "resourceClaims": (
        {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]},
        lambda each: main(each)["resources"]["claims"] == [{"name": "gpu"}] and "cpu" in str(main(each)),
    ),
    "lifecycle": (
        {"lifecycle": {"preStop": {"exec": {"command": ["true"]}}}},
        lambda each: main(each)["lifecycle"] == {"preStop": {"exec": {"command": ["true"]}}},
    ),
    "nodeSelector": (
        {"nodeSelector": {"pool": "a"}},
        lambda each: each["spec"]["nodeSelector"] == {"pool": "a"},
    ),
    "priorityClassName": (
        {"priorityClassName": "high"},
        lambda each: each["spec"]["priorityClassName"] == "high",
    ),
    "podSpec": (
        {"podSpec": {"shareProcessNamespace": True, "securityContext": {"fsGroup": None}}},
        lambda each: (
            each["spec"]["shareProcessNamespace"] is True and "fsGroup" not in each["spec"]["securityContext"]
        ),
    ),
}


@pytest.mark.parametrize("target", TARGETS, ids=KINDS)
def test_every_pod_has_all_extension_points(target: Manifest) -> None:
    extended = on_every_pod(laid_over(extension for extension, _ in EXTENSIONS.values()), target)
    for pod, template in extended.items():
        for name, (_, holds) in EXTENSIONS.items():
            assert holds(template), f"{pod} has no {name}: {template}"


def test_pods_of_the_hosts_network_may_have_their_own_dns() -> None:
    dns = {"hostNetwork": True, "dnsPolicy": "None", "dnsConfig": {"nameservers": ["fd00::53"]}}
    spec = pods(render({"draft": dns, "networkPolicy": {"enabled": False}}))["draft"]
    assert {name: spec[name] for name in dns} == dns


@pytest.mark.parametrize("gateway", [{"hostNetwork": True}, {"podSpec": {"hostNetwork": True}}])
def test_gateways_of_the_hosts_network_make_room_first(gateway: Manifest) -> None:
    """On as many nodes as gateways, no node has free ports for one more."""
    values = {"gateway": gateway, "networkPolicy": {"enabled": False}}
    strategy = workloads(render(values))["gateway"]["spec"]["strategy"]
    assert strategy == {"rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}}
    usual = workloads(render())["gateway"]["spec"]["strategy"]
    assert usual == {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"gateway": {"hostNetwork": True}}, "gateway"),
        ({"target": {"podSpec": {"hostNetwork": True}}}, "target"),
        ({"target": {"rayService": {"head": {"hostNetwork": True}}}}, "target.rayService.head"),
        ({"redis": {"embedded": {"hostNetwork": True}}}, "redis.embedded"),
        ({"drafts": [{"name": "big", "hostNetwork": True}]}, "drafts[big]"),
    ],
)
def test_the_hosts_network_and_policies_exclude_each_other(values: Manifest, name: str) -> None:
    refusal = render_refused(values)
    assert f"networkPolicy.enabled: must be false with {name}.hostNetwork" in refusal


def test_pod_annotations_replace_those_of_the_chart() -> None:
    templates = on_every_pod({"podAnnotations": {"prometheus.io/port": "15020", "mesh": "on"}}, {})
    for pod in ROLES:
        annotations = templates[pod]["metadata"]["annotations"]
        assert annotations["prometheus.io/port"] == "15020", pod
        assert annotations["kubectl.kubernetes.io/default-container"] == pod
        assert annotations["mesh"] == "on"


def test_labels_that_select_pods_cannot_be_set() -> None:
    refusal = render_refused({"draft": {"podLabels": {"app.kubernetes.io/component": "gateway"}}})
    assert "/draft/podLabels" in refusal


def test_probe_times_are_laid_over_those_of_the_chart() -> None:
    times = {"startupProbe": {"failureThreshold": 900}, "livenessProbe": {"periodSeconds": 60}}
    for pod in ROLES:
        container = main(on_every_pod(times, {})[pod])
        assert container["startupProbe"]["failureThreshold"] == 900
        assert container["startupProbe"]["grpc"] == container["readinessProbe"]["grpc"]
        assert container["livenessProbe"]["periodSeconds"] == 60
    assert "Probe" not in str(on_every_pod(times, GROUP)["target-worker"]), "workers have none"


@pytest.mark.parametrize("target", TARGETS, ids=KINDS)
def test_the_pod_spec_has_the_last_word(target: Manifest) -> None:
    """Containers and volumes merge by name, so that one field can be changed without repeating the rest."""
    main_container = "ray-worker" if target == RAY else "target"
    spec = {
        "containers": [
            {
                "name": main_container,
                "workingDir": "/tmp",
                "env": [{"name": "GALLEY_TARGET_LOG_LEVEL", "value": "debug"}],
                "volumeMounts": [{"name": "scratch", "mountPath": "/tmp"}],
                "resources": {"limits": {"rdma/hca": 1}},
            }
        ],
        "volumes": [
            {"name": "cache", "hostPath": {"path": "/mnt/nvme"}},
            {"name": "scratch", "emptyDir": {}},
        ],
        "runtimeClassName": "kata",
        "tolerations": [{"operator": "Exists"}],
    }
    values = {**target, "runtimeClassName": "nvidia", "podSpec": spec}
    plain = pods(render({"target": target}))["target"]
    changed = pods(render({"target": values}))["target"]
    (before,) = plain["containers"]
    (after,) = changed["containers"]
    assert after["workingDir"] == "/tmp"
    assert env_of(after) == {**env_of(before), "GALLEY_TARGET_LOG_LEVEL": "debug"}
    assert [each["mountPath"] for each in after["volumeMounts"]] == [
        each["mountPath"] for each in before["volumeMounts"]
    ]
    assert after["volumeMounts"][0]["name"] == "scratch"
    assert after["resources"] == {
        "requests": before["resources"]["requests"],
        "limits": {**before["resources"]["limits"], "rdma/hca": 1},
    }
    volumes = {each["name"]: each for each in changed["volumes"]}
    assert volumes["cache"] == {"name": "cache", "hostPath": {"path": "/mnt/nvme"}}
    assert changed["runtimeClassName"] == "kata"
    assert changed["tolerations"] == [{"operator": "Exists"}]


def test_what_is_not_extended_is_rendered_as_before() -> None:
    plain = pods(render())
    changed = pods(render({"draft": {"podSpec": {"hostname": "draft"}}}))
    assert {name for name in plain if plain[name] != changed[name]} == {"draft"}
    assert changed["draft"] == {**plain["draft"], "hostname": "draft"}


@pytest.mark.parametrize("target", TARGETS, ids=KINDS)
def test_a_later_variable_replaces_an_earlier_one_of_its_name(target: Manifest) -> None:
    values = {
        "extraEnv": [{"name": "GALLEY_TARGET_PORT", "value": "1"}, {"name": "TWICE", "value": "all"}],
        "target": {
            **target,
            "extraEnv": [
                {"name": "NODE_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}},
                {"name": "GALLEY_TARGET_ADVERTISE", "value": "$(NODE_IP):30053"},
                {"name": "TWICE", "value": "first"},
                {"name": "TWICE", "value": "last"},
                {"name": "POD_IP", "value": "10.0.0.1"},
            ],
        },
    }
    container = pods(render(values))["target"]["containers"][0]
    names = [entry["name"] for entry in container["env"]]
    assert len(names) == len(set(names))
    variables = env_of(container)
    assert variables["GALLEY_TARGET_ADVERTISE"] == "$(NODE_IP):30053"
    assert names.index("NODE_IP") < names.index("GALLEY_TARGET_ADVERTISE"), "it would not be expanded"
    assert (variables["TWICE"], variables["GALLEY_TARGET_PORT"]) == ("last", "1")
    assert {"name": "POD_IP", "value": "10.0.0.1"} in container["env"]


def test_a_variable_that_others_refer_to_keeps_its_place() -> None:
    own = [{"name": "POD_IP", "value": "10.0.0.1"}]
    container = pods(render({"target": {"extraEnv": own}}))["target"]["containers"][0]
    names = [entry["name"] for entry in container["env"]]
    assert names.index("POD_IP") < names.index("GALLEY_TARGET_ADVERTISE")


def test_downloads_get_the_extensions_of_their_role() -> None:
    extension: dict[str, Any] = {
        "envFrom": [{"secretRef": {"name": "proxy"}}],
        "extraVolumes": [{"name": "authorities", "configMap": {"name": "authorities"}}],
        "extraVolumeMounts": [{"name": "authorities", "mountPath": "/etc/ssl/certs", "readOnly": True}],
        "initContainers": [{"name": "mirror", "image": "mirror:1", "restartPolicy": "Always"}],
    }
    rendered = pods(render({**DOWNLOADED, "target": extension}))
    mirror, download = rendered["target"]["initContainers"]
    assert mirror == extension["initContainers"][0], "a download may need what stands before it"
    assert download["name"] == "download"
    assert download["envFrom"] == extension["envFrom"]
    assert download["volumeMounts"][-1] == extension["extraVolumeMounts"][0]
    assert "envFrom" not in rendered["draft"]["initContainers"][0]
