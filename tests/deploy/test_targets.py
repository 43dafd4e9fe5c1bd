"""The three kinds of target: one pod, a group of pods, and pods that Ray Serve fills."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from galley.common.config.settings import ServiceSettings
from services.target.ray import cluster as ray_cluster
from services.target.settings import TargetSettings
from tests.deploy.render import (
    ROOT,
    Manifest,
    component,
    default_values,
    env_of,
    of_kind,
    only_container,
    pod_templates,
    pods,
    render,
    render_refused,
)
from tests.deploy.settings_of import parse_env

GROUP = {"target": {"kind": "leaderworkerset", "nodes": 2, "tensorParallel": 8, "gpus": 4, "replicas": 3}}
VLLM: dict[str, Any] = {"engine": "vllm", "image": {"repository": "galley-target-vllm-cuda"}}
RAY = {"target": {"kind": "rayservice", "tensorParallel": 4, "gpus": 4, "replicas": 2}}


def test_a_pod_with_several_gpus_runs_a_rank_on_each() -> None:
    rendered = render({"target": {"tensorParallel": 4, "gpus": 4, "sharedMemory": "8Gi"}})
    container = only_container(pods(rendered)["target"])
    actual = env_of(container)
    assert (actual["GALLEY_TARGET_TENSOR_PARALLEL"], actual["GALLEY_TARGET_DEVICE"]) == ("4", "cuda")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert "nvidia.com/gpu" not in container["resources"]["requests"]
    volumes = {volume["name"]: volume for volume in pods(rendered)["target"]["volumes"]}
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in container["volumeMounts"]


def test_vllm_gets_its_arguments_as_json() -> None:
    target = {
        **VLLM,
        "kind": "deployment",
        "tensorParallel": 2,
        "gpus": 2,
        "vllmArgs": {"max_num_partial_prefills": 1000000, "quantization": "fp8"},
    }
    container = only_container(pods(render({"target": target}))["target"])
    settings = parse_env("target", {**env_of(container), "POD_IP": "10.0.0.1"})
    assert isinstance(settings, TargetSettings)
    assert (settings.engine, settings.device, settings.tensor_parallel) == ("vllm", "cuda", 2)
    assert settings.vllm_arguments == target["vllmArgs"]
    assert isinstance(settings.vllm_arguments["max_num_partial_prefills"], int)
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    # Ranks of any kind exchange data there.
    assert "/dev/shm" in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert "GALLEY_TARGET_ENGINE" not in env_of(only_container(pods(render())["target"]))


def test_gpu_resource_name() -> None:
    rendered = render({"target": {"gpus": 1, "gpuResource": "amd.com/gpu"}})
    assert only_container(pods(rendered)["target"])["resources"]["limits"]["amd.com/gpu"] == 1


def test_one_rank_needs_no_rank_settings() -> None:
    rendered = render()
    container = only_container(pods(rendered)["target"])
    names = set(env_of(container))
    assert not {"GALLEY_TARGET_TENSOR_PARALLEL", "GALLEY_TARGET_HOSTS", "GALLEY_TARGET_DEVICE"} & names
    assert "/dev/shm" not in {mount["mountPath"] for mount in container["volumeMounts"]}


def settings_of_host(rendered: list[Manifest], name: str, index: int) -> ServiceSettings:
    """Return the settings of the `index`-th pod of the first group."""
    labels = {
        "leaderworkerset.sigs.k8s.io/worker-index": str(index),
        "leaderworkerset.sigs.k8s.io/group-index": "0",
    }
    filled: dict[str, str] = {"POD_IP": "10.0.0.1"}
    for entry in only_container(pods(rendered)[name])["env"]:
        value = entry.get("value", "")
        field = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        if field.startswith("metadata.labels"):
            value = labels[field.removeprefix("metadata.labels['").removesuffix("']")]
        for variable, known in filled.items():
            value = value.replace(f"$({variable})", known)
        filled.setdefault(entry["name"], value)
    return parse_env("target", {key: value for key, value in filled.items() if key.startswith("GALLEY_")})


def test_pods_of_a_group_have_index_and_address() -> None:
    rendered = render(GROUP)
    leader = settings_of_host(rendered, "target", 0)
    worker = settings_of_host(rendered, "target-worker", 1)
    assert isinstance(leader, TargetSettings)
    assert isinstance(worker, TargetSettings)
    assert (leader.host_index, worker.host_index) == (0, 1)
    assert leader.hosts == worker.hosts == 2
    assert leader.tensor_parallel == worker.tensor_parallel == 8
    assert leader.ranks_address == worker.ranks_address == "galley-target-0.galley-target:50063"
    assert leader.ranks_timeout_s == default_values()["target"]["startupTimeoutSeconds"]


def test_a_group_lives_and_dies_together() -> None:
    rendered = render(GROUP)
    (group,) = of_kind(rendered, "LeaderWorkerSet").values()
    template = group["spec"]["leaderWorkerTemplate"]
    assert (group["spec"]["replicas"], template["size"]) == (3, 2)
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    # The leader waits for its workers: they must not wait for it.
    assert group["spec"]["startupPolicy"] == "LeaderCreated"


def test_group_uses_the_service_of_its_controller() -> None:
    """It has the name of the set and publishes unready pods; the chart must not create it."""
    rendered = render(GROUP)
    (group,) = of_kind(rendered, "LeaderWorkerSet").values()
    assert group["spec"]["networkConfig"] == {"subdomainPolicy": "Shared"}
    assert group["metadata"]["name"] not in of_kind(rendered, "Service")
    assert "galley-target-headless" in of_kind(rendered, "Service"), "for a ServiceMonitor"
    (one,) = (each for each in of_kind(render(), "StatefulSet").values() if component(each) == "target")
    assert one["spec"]["serviceName"] in of_kind(render(), "Service")


def test_only_leaders_have_probes_and_metrics() -> None:
    templates = pod_templates(render(GROUP))
    leader, worker = (only_container(templates[name]["spec"]) for name in ("target", "target-worker"))
    assert "readinessProbe" in leader
    assert not [name for name in worker if name.endswith("Probe")]
    assert "ports" not in worker
    scraped = "prometheus.io/scrape"
    assert scraped in templates["target"]["metadata"]["annotations"]
    assert scraped not in templates["target-worker"]["metadata"]["annotations"]


def serve_config(values: Manifest) -> tuple[dict[str, Any], dict[str, Any]]:
    (service,) = of_kind(render(values), "RayService").values()
    config: dict[str, Any] = yaml.safe_load(service["spec"]["serveConfigV2"])
    return config, service["spec"]


def test_serve_config_matches_the_committed_one() -> None:
    config, _ = serve_config(RAY)
    committed = yaml.safe_load((ROOT / "deploy" / "ray" / "target.yaml").read_text())
    assert config["proxy_location"] == committed["proxy_location"]
    (ours,), (theirs,) = config["applications"], committed["applications"]
    for key in ("name", "route_prefix", "import_path"):
        assert ours[key] == theirs[key]
    assert [each["name"] for each in ours["deployments"]] == [each["name"] for each in theirs["deployments"]]


def test_ray_replica_has_a_pod_and_ports() -> None:
    config, spec = serve_config(RAY)
    (application,) = config["applications"]
    (deployment,) = application["deployments"]
    (workers,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    replicas = [workers[key] for key in ("replicas", "minReplicas", "maxReplicas")]
    assert {deployment["num_replicas"], *replicas} == {2}
    settings = application["args"]["settings"]
    assert application["args"]["tensor_parallel"] == 4
    assert settings["port"] == default_values()["target"]["port"]
    assert TargetSettings(**settings).device == "cuda"
    assert workers["rayStartParams"] == {"num-cpus": "4", "num-gpus": "4"}
    (container,) = workers["template"]["spec"]["containers"]
    assert container["readinessProbe"]["grpc"] == {"port": default_values()["target"]["healthPort"]}


@pytest.mark.parametrize(
    ("budget", "least"),
    [
        ({}, 2),
        ({"maxUnavailable": 2}, 1),
        ({"maxUnavailable": None, "minAvailable": 3}, 3),
        ({"maxUnavailable": None, "minAvailable": 0}, 0),
    ],
)
def test_ray_budget_is_a_number(budget: Manifest, least: int) -> None:
    """Kubernetes does not know how many KubeRay wants, and takes no other form."""
    target = {"kind": "rayservice", "replicas": 3, "podDisruptionBudget": budget}
    spec = of_kind(render({"target": target}), "PodDisruptionBudget")["galley-target"]["spec"]
    assert spec["minAvailable"] == least
    assert "maxUnavailable" not in spec


def test_no_replica_goes_to_rays_head() -> None:
    _, spec = serve_config(RAY)
    head = spec["rayClusterConfig"]["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == head["rayStartParams"]["num-gpus"] == "0"


def test_ray_head_has_the_priority_of_targets() -> None:
    rendered = pods(render({"target": {"kind": "rayservice", "priorityClassName": "serving"}}))
    assert rendered["ray-head"]["priorityClassName"] == rendered["target"]["priorityClassName"] == "serving"


def test_ray_environment() -> None:
    """`ray_cluster.start` sets it for its own Ray; KubeRay starts this one."""
    with patch.dict(os.environ, clear=True):
        ray_cluster._environment("")
        expected = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    for name in ("ray-head", "target"):
        given = env_of(only_container(pods(render(RAY))[name]))
        assert expected.items() <= given.items(), name


def test_ray_head_ports() -> None:
    """Without the port `serve` it fails before a RayService is ready."""
    _, spec = serve_config(RAY)
    (head,) = spec["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in head["ports"]}
    assert ports == {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "serve": 8000}
    assert spec["excludeHeadPodFromServeSvc"] is True, "its proxy would be asked every other second"


def test_ray_needs_a_token() -> None:
    _, spec = serve_config(RAY)
    assert spec["rayClusterConfig"]["authOptions"] == {"mode": "token"}


def test_the_version_of_ray_is_the_one_that_is_installed() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    assert default_values()["target"]["rayService"]["rayVersion"] == pins["ray"]


def target_of(values: Manifest, kind: str) -> Manifest:
    (one,) = (each for each in of_kind(render(values), kind).values() if component(each) == "target")
    return one


def test_a_deployment_can_start_new_replicas_first() -> None:
    spec = target_of({"target": {"kind": "deployment", "maxSurge": 1}}, "Deployment")["spec"]
    assert spec["strategy"] == {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    assert spec["progressDeadlineSeconds"] > default_values()["target"]["startupTimeoutSeconds"]
    in_place = target_of({"target": {"kind": "deployment"}}, "Deployment")["spec"]
    assert in_place["strategy"] == {"rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}}
    ours = spec["template"]
    assert ours == target_of({}, "StatefulSet")["spec"]["template"], "all else is as in a StatefulSet"


def test_keda_scales_the_kind_that_there_is() -> None:
    keda = {"enabled": True, "prometheus": {"serverAddress": "http://prometheus:9090"}}
    scaler = of_kind(render({"target": {"kind": "deployment"}, "keda": keda}), "ScaledObject")[
        "galley-target"
    ]
    assert scaler["spec"]["scaleTargetRef"] == {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "name": "galley-target",
    }


def test_a_group_may_have_a_rack_of_its_own() -> None:
    rack = {"target": {**GROUP["target"], "exclusiveTopology": "topology.example.com/rack"}}
    annotation = {"leaderworkerset.sigs.k8s.io/exclusive-topology": "topology.example.com/rack"}
    assert target_of(rack, "LeaderWorkerSet")["metadata"]["annotations"] == annotation
    assert "annotations" not in target_of(GROUP, "LeaderWorkerSet")["metadata"]


def test_rays_head_may_keep_its_state_in_redis() -> None:
    password = {"secretName": "ray-redis", "key": "password"}
    store = {"redisAddress": "redis://ray-redis:6380", "redisPassword": password}
    tolerant = {"target": {**RAY["target"], "rayService": {"gcsFaultTolerance": store}}}
    rendered = render(tolerant)
    (service,) = of_kind(rendered, "RayService").values()
    assert service["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"] == {
        "redisAddress": "redis://ray-redis:6380",
        "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "ray-redis", "key": "password"}}},
    }
    egress = of_kind(rendered, "NetworkPolicy")["galley-ray-head"]["spec"]["egress"]
    assert {"ports": [{"port": 6380, "protocol": "TCP"}]} in egress
    (plain,) = of_kind(render(RAY), "RayService").values()
    assert "gcsFaultToleranceOptions" not in plain["spec"]["rayClusterConfig"]


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (
            {
                "kind": "rayservice",
                "rayService": {"gcsFaultTolerance": {"redisAddress": "redis://u:pw@ray-redis:6379"}},
            },
            "target.rayService.gcsFaultTolerance.redisAddress: must hold no user or password",
        ),
        (
            {"engine": "vllm"},
            "must be an image with vLLM with target.engine vllm, such as galley-target-vllm, got galley-t",
        ),
        (
            {"engine": "vllm", "image": {"repository": "example/galley-target-cuda"}},
            "such as galley-target-vllm-cuda, got galley-target-cuda",
        ),
        (
            {"image": {"repository": "galley-target-vllm"}},
            "target.engine: must be vllm with target.image.repository galley-target-vllm, got paged",
        ),
        ({"vllmArgs": {"seed": 1}}, "target.vllmArgs: must be empty with target.engine paged"),
        (
            {**VLLM, "kind": "rayservice"},
            "target.kind: must be statefulset or deployment with target.engine vllm",
        ),
        ({**VLLM, "settings": {"quantization": "int8"}}, "target.settings.quantization: must be none"),
        ({**VLLM, "settings": {"invariant": True}}, "target.settings.invariant: must be false"),
        (
            {**VLLM, "vllmArgs": {"tensor_parallel_size": 2}},
            "target.vllmArgs.tensor_parallel_size: must not be set; set target.tensorParallel",
        ),
        (
            {**VLLM, "vllmArgs": {"pipeline_parallel_size": 2}},
            "pipeline_parallel_size",
        ),
        ({"maxSurge": 1}, "target.maxSurge: must be 0 with target.kind statefulset, got 1"),
        (
            {"exclusiveTopology": "rack"},
            "target.exclusiveTopology: must be empty with target.kind statefulset",
        ),
        (
            {"gpus": 2, "tensorParallel": 2, "gpuResource": "nvidia.com/mig-3g.40gb"},
            "target.tensorParallel: must be 1 with target.gpuResource nvidia.com/mig-3g.40gb, got 2",
        ),
    ],
)
def test_shapes_that_cannot_work_are_refused(target: Manifest, reason: str) -> None:
    assert reason in render_refused({"target": target})


def test_a_slice_of_a_gpu_is_one_rank() -> None:
    target = {"gpus": 1, "gpuResource": "nvidia.com/mig-3g.40gb"}
    limits = only_container(pods(render({"target": target}))["target"])["resources"]["limits"]
    assert limits["nvidia.com/mig-3g.40gb"] == 1


def test_a_device_may_come_by_a_claim() -> None:
    target = {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "gpu"}]}
    rendered = render({"target": {**target, "settings": {"device": "cuda"}}})
    container = only_container(pods(rendered)["target"])
    assert container["resources"]["claims"] == [{"name": "gpu"}]
    assert env_of(container)["GALLEY_TARGET_DEVICE"] == "cuda"
