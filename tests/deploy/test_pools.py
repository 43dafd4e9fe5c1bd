"""Pools of drafts of several kinds: each has its own model, hardware and scaling."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy import schemas
from tests.deploy.invariants import hold
from tests.deploy.matrix import KEDA, laid_over
from tests.deploy.render import (
    Manifest,
    component,
    container,
    env,
    of_kind,
    pod,
    pod_templates,
    render,
    render_refused,
    workloads,
)

POOLS: dict[str, Any] = {
    "draft": {"settings": {"default_strategy": "hybrid", "model": "example/small"}, "replicas": 2},
    "drafts": [
        {"name": "small", "nodeSelector": {"pool": "cpu"}},
        {
            "name": "large",
            "gpus": 1,
            "replicas": 3,
            "image": {"repository": "galley-draft-cuda"},
            "settings": {"model": "example/larger", "max_kv_tokens": 5_000_000},
        },
        {"name": "lookup", "settings": {"model": None, "default_strategy": "ngram"}},
    ],
}
BARE: dict[str, Any] = {"drafts": [{"name": "bare", "settings": None}]}


@pytest.mark.parametrize("name", ["8", "1e3", "on", "null"])
def test_the_name_of_a_pool_is_a_text(name: str) -> None:
    rendered = render({"drafts": [{"name": name}]})
    for manifest in rendered:
        schemas.check(manifest)
    pool = workloads(rendered)[f"draft-{name}"]
    assert pool["spec"]["selector"]["matchLabels"]["galley-pool"] == name


def test_each_pool_has_its_own_model_and_hardware() -> None:
    rendered = render(POOLS)
    hold(rendered)
    for manifest in rendered:
        schemas.check(manifest)
    pools = workloads(rendered)
    small, large, lookup = (pools[f"draft-{name}"] for name in ("small", "large", "lookup"))
    assert "draft" not in pools
    assert [it["metadata"]["name"] for it in (small, large)] == ["galley-draft-small", "galley-draft-large"]
    assert [it["spec"]["replicas"] for it in (small, large, lookup)] == [2, 3, 2]
    assert env(small)["GALLEY_DRAFT_MODEL"] == "example/small"
    assert env(large)["GALLEY_DRAFT_MODEL"] == "example/larger"
    assert env(large)["GALLEY_DRAFT_MAX_KV_TOKENS"] == "5000000"
    assert env(large)["GALLEY_DRAFT_DEFAULT_STRATEGY"] == "hybrid", "the common value"
    assert "GALLEY_DRAFT_MODEL" not in env(lookup)
    assert container(large)["image"] == "galley-draft-cuda:0.1.0"
    assert container(large)["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert "nvidia.com/gpu" not in container(small)["resources"]["limits"]
    assert pod(small)["nodeSelector"] == {"pool": "cpu"}
    assert "nodeSelector" not in pod(large)


def test_pools_do_not_take_the_pods_of_others() -> None:
    rendered = render(POOLS)
    labels = {
        name: template["metadata"]["labels"]
        for name, template in pod_templates(rendered).items()
        if name.startswith("draft-")
    }
    assert len(labels) == 3
    chosen = [
        *(it["spec"]["selector"]["matchLabels"] for it in workloads(rendered).values() if _is_draft(it)),
        *(it["spec"]["selector"] for it in of_kind(rendered, "Service").values() if _is_draft(it)),
        *(
            it["spec"]["selector"]["matchLabels"]
            for it in of_kind(rendered, "PodDisruptionBudget").values()
            if _is_draft(it)
        ),
    ]
    assert len(chosen) == 9
    for selector in chosen:
        assert sum(selector.items() <= one.items() for one in labels.values()) == 1, selector
    # One policy is for all of them.
    (policy,) = [it for it in of_kind(rendered, "NetworkPolicy").values() if _is_draft(it)]
    selector = policy["spec"]["podSelector"]["matchLabels"]
    assert all(selector.items() <= one.items() for one in labels.values())


def _is_draft(manifest: Manifest) -> bool:
    return component(manifest).startswith("draft")


def test_each_pool_scales_by_its_own_pods() -> None:
    scaled = {
        "keda": KEDA,
        "drafts": [{**POOLS["drafts"][0]}, {**POOLS["drafts"][1], "keda": {"maxReplicas": 3}}],
    }
    rendered = render(laid_over([POOLS, scaled]))
    hold(rendered)
    objects = of_kind(rendered, "ScaledObject")
    assert objects["galley-draft-small"]["spec"]["maxReplicaCount"] == 8
    assert objects["galley-draft-large"]["spec"]["maxReplicaCount"] == 3
    for name in ("small", "large"):
        (wait, age) = objects[f"galley-draft-{name}"]["spec"]["triggers"]
        pods = f'pod=~"galley-draft-{name}-[a-z0-9]+-[a-z0-9]+"'
        # Waits are measured at gateways; KEDA divides by the replicas of the pool.
        assert wait["metadata"]["query"].count(pods) == 1
        assert wait["metadata"]["query"].split(" * ")[-1].startswith("count(galley_draft_queue_depth{")
        assert age["metadata"]["query"].count(pods) == age["metadata"]["query"].count("galley_draft_queue_")
    alone = render({"keda": KEDA})
    (_, age) = of_kind(alone, "ScaledObject")["galley-draft"]["spec"]["triggers"]
    assert "pod=~" not in age["metadata"]["query"]


def test_only_pools_that_keda_scales_need_short_names() -> None:
    """Kubernetes cuts what precedes the random part of a pod's name to 58 characters."""
    long = {"drafts": [{"name": "a"}], "fullnameOverride": "n" * 39}
    assert render(long)
    assert render({**long, "keda": {**KEDA, "draft": {"enabled": False}}})
    assert render({**long, "keda": KEDA, "fullnameOverride": "n" * 38})


def test_a_pool_may_scale_by_cpu() -> None:
    autoscaling = {"enabled": True, "minReplicas": 1, "maxReplicas": 9}
    pools = [{**POOLS["drafts"][0], "autoscaling": autoscaling}, POOLS["drafts"][1]]
    rendered = render({**POOLS, "drafts": pools})
    hold(rendered)
    (scaler,) = of_kind(rendered, "HorizontalPodAutoscaler").values()
    assert scaler["spec"]["scaleTargetRef"]["name"] == "galley-draft-small"
    assert scaler["spec"]["maxReplicas"] == 9


def test_null_removes_the_settings_of_a_pool() -> None:
    (pool,) = (it for it in workloads(render(laid_over([POOLS, BARE]))).values() if _is_draft(it))
    assert "GALLEY_DRAFT_MODEL" not in env(pool)


def test_a_job_downloads_the_models_of_all_pools() -> None:
    cache = {"persistence": {"enabled": True}, "download": {"enabled": True, "mode": "job"}}
    (job,) = of_kind(render({**POOLS, "modelCache": cache}), "Job").values()
    assert job["spec"]["template"]["spec"]["containers"][0]["command"][3:] == [
        "example/small",
        "example/larger",
    ]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"drafts": [{"name": "a"}, {"name": "a"}]}, "drafts: names must differ, got a, a"),
        ({"drafts": [{"name": "a"}], "draft": {"enabled": False}}, "drafts: must be empty"),
        (
            {"drafts": [{"name": "a", "gpus": 1}]},
            "drafts[a].gpus: must be 0 without drafts[a].settings.model",
        ),
        ({"drafts": [{"replicas": 1}]}, "name"),
        ({"drafts": [{"name": "a", "port": 50060}]}, "port"),
        ({"drafts": [{"name": "Upper"}]}, "name"),
        (
            {"drafts": [{"name": "a", "keda": {"minReplicas": 9}}], "keda": KEDA},
            "drafts[a].keda.minReplicas: must be at most drafts[a].keda.maxReplicas (8), got 9",
        ),
        (
            {"drafts": [{"name": "a"}], "keda": KEDA, "fullnameOverride": "n" * 39},
            "drafts[a].name: must give objects a name of at most 46 characters with keda.enabled, got nnn",
        ),
        (
            {"drafts": [{"name": "a", "modelSize": "5Gi", "settings": {"model": "example/small"}}]},
            "modelCache.sizeLimit: must be at least drafts[a].modelSize (5Gi), got 4Gi",
        ),
    ],
)
def test_pools_that_cannot_work_are_refused(values: Manifest, reason: str) -> None:
    assert reason in render_refused(values)
