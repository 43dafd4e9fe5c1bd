"""Where models come from: the hub, by init containers or a Job; claims, images, and directories of nodes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy import schemas
from tests.deploy.invariants import hold
from tests.deploy.matrix import laid_over
from tests.deploy.render import (
    CHART,
    HelmFailed,
    Manifest,
    env_of,
    helm,
    of_kind,
    only_container,
    pods,
    render,
    render_refused,
)

GROUP = {"target": {"kind": "leaderworkerset", "nodes": 2, "tensorParallel": 8, "gpus": 4, "replicas": 3}}
RAY = {"target": {"kind": "rayservice", "tensorParallel": 4, "gpus": 4, "replicas": 2}}
SERVERS = {"gateway", "draft", "target"}
COMMAND = ["python", "-m", "galley.common.models.download"]
HUB: dict[str, Any] = {
    "model": "example/big",
    "draft": {"settings": {"model": "example/small"}},
    "modelCache": {"download": {"enabled": True}, "hubToken": {"secretName": "hub"}},
}
JOB: dict[str, Any] = laid_over(
    [HUB, {"modelCache": {"download": {"mode": "job"}, "persistence": {"enabled": True}}}]
)


@pytest.mark.parametrize("values", [{}, GROUP, RAY], ids=["one pod", "a group", "ray"])
def test_downloaded_model_is_used_offline(values: Manifest) -> None:
    for name, spec in pods(render(laid_over([HUB, values]))).items():
        role = name.removesuffix("-worker")
        if role not in SERVERS:
            assert "initContainers" not in spec, name
            continue
        (download,) = spec["initContainers"]
        expected = {
            "draft": ["example/small"],
            "target": ["example/big"],
            "gateway": ["example/big", "--tokenizer"],
        }
        assert download["command"] == [*COMMAND, *expected[role]]
        assert [entry["name"] for entry in download["env"]] == ["HF_TOKEN"]
        _is_offline(spec)
        assert {"name": "cache", "mountPath": "/var/cache/galley"} in download["volumeMounts"]
        assert download["image"] == only_container(spec)["image"]


def _is_offline(spec: Manifest) -> None:
    actual = env_of(only_container(spec))
    assert actual["HF_HUB_OFFLINE"] == "1"
    assert "HF_TOKEN" not in actual


def test_a_draft_without_a_model_needs_the_tokenizer() -> None:
    values = {"model": "example/big", "modelCache": {"download": {"enabled": True}}}
    draft = pods(render(values))["draft"]
    assert draft["initContainers"][0]["command"] == [*COMMAND, "example/big", "--tokenizer"]
    assert env_of(only_container(draft))["GALLEY_DRAFT_TOKENIZER"] == "example/big"


def test_a_trained_draft_needs_the_embeddings_of_its_target() -> None:
    trained = {"draft": {"settings": {"model": "example/head", "target_model": "example/big@abc"}}}
    draft = pods(render(laid_over([HUB, trained])))["draft"]
    assert draft["initContainers"][0]["command"] == [*COMMAND, "example/head", "example/big@abc"]
    (job,) = of_kind(render(laid_over([JOB, trained])), "Job").values()
    command = only_container(job["spec"]["template"]["spec"])["command"]
    assert command == [*COMMAND, "example/big", "example/head", "example/big@abc"]


def test_a_draft_from_a_directory_needs_the_embeddings_too() -> None:
    trained = {"draft": {"settings": {"model": "/models/volume/head", "target_model": "example/big"}}}
    values = {**trained, "modelCache": {"download": {"enabled": True}}}
    draft = pods(render(values))["draft"]
    assert draft["initContainers"][0]["command"] == [*COMMAND, "example/big"]
    _is_offline(draft)
    token = {"modelCache": {"hubToken": {"secretName": "hub"}}}
    assert "HF_TOKEN" in env_of(only_container(pods(render({**trained, **token}))["draft"]))


def test_servers_that_download_get_the_token() -> None:
    values = {"model": "example/big", "modelCache": {"hubToken": {"secretName": "hub"}}}
    rendered = pods(render(values))
    for role in SERVERS:
        (token,) = [it for it in only_container(rendered[role])["env"] if it["name"] == "HF_TOKEN"]
        assert token["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}, role
        assert "HF_HUB_OFFLINE" not in env_of(only_container(rendered[role]))
    own = pods(
        render({"draft": {"settings": {"model": "example/small"}}, "modelCache": values["modelCache"]})
    )
    assert [role for role in SERVERS if "HF_TOKEN" in env_of(only_container(own[role]))] == ["draft"]


@pytest.mark.parametrize("values", [{}, GROUP, RAY], ids=["one pod", "a group", "ray"])
def test_a_job_downloads_and_all_others_wait(values: Manifest) -> None:
    rendered = render(laid_over([JOB, values]))
    hold(rendered)
    (job,) = of_kind(rendered, "Job").values()
    spec = job["spec"]["template"]["spec"]
    downloading = only_container(spec)
    assert downloading["command"] == [*COMMAND, "example/big", "example/small"]
    assert [entry["name"] for entry in downloading["env"]] == ["HF_TOKEN"]
    claim = {"name": "cache", "persistentVolumeClaim": {"claimName": "galley-model-cache"}}
    assert claim in spec["volumes"]
    for name, pod in pods(rendered).items():
        role = name.removesuffix("-worker")
        if role in SERVERS:
            (wait,) = pod["initContainers"]
            model = "example/small" if role == "draft" else "example/big"
            assert wait["command"] == [*COMMAND, model, "--wait"]
            assert env_of(wait) == {"HF_HUB_OFFLINE": "1"}, "no token"
            assert claim in pod["volumes"]
            _is_offline(pod)


def test_a_changed_job_has_another_name() -> None:
    """Kubernetes refuses a change of a Job's template."""
    pinned = {"modelCache": {"download": {"podSpec": {"nodeSelector": {"disk": "fast"}}}}}
    names = [
        next(iter(of_kind(render(laid_over([JOB, change])), "Job")))
        for change in ({}, {"model": "example/bigger"}, pinned, {"image": {"tag": "2"}})
    ]
    assert len(set(names)) == len(names)
    (job,) = of_kind(render(laid_over([JOB, pinned])), "Job").values()
    assert job["spec"]["template"]["spec"]["nodeSelector"] == {"disk": "fast"}


def test_downloads_get_proxy_settings() -> None:
    values = {
        "model": "example/big",
        "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
        "draft": {"settings": {"model": "example/small"}},
        "target": {"extraEnv": [{"name": "HF_ENDPOINT", "value": "https://mirror.example.com"}]},
        "modelCache": {"download": {"enabled": True}},
    }
    rendered = pods(render(values))
    actual = {role: set(env_of(rendered[role]["initContainers"][0])) for role in ("draft", "target")}
    assert actual == {"draft": {"HTTPS_PROXY"}, "target": {"HTTPS_PROXY", "HF_ENDPOINT"}}


def test_the_job_trusts_what_the_targets_trust() -> None:
    target: dict[str, Any] = {
        "extraVolumes": [{"name": "authorities", "configMap": {"name": "company"}}],
        "extraVolumeMounts": [{"name": "authorities", "mountPath": "/etc/ssl/company", "readOnly": True}],
        "extraEnv": [{"name": "SSL_CERT_FILE", "value": "/etc/ssl/company/ca.crt"}],
        "podSecurityContext": {"fsGroup": 2000},
        "securityContext": {"runAsUser": 2001},
    }
    spec = pods(render(laid_over([JOB, {"target": target}])))["download"]
    assert target["extraVolumes"][0] in spec["volumes"]
    assert target["extraVolumeMounts"][0] in only_container(spec)["volumeMounts"]
    assert env_of(only_container(spec))["SSL_CERT_FILE"] == "/etc/ssl/company/ca.crt"
    assert spec["securityContext"]["fsGroup"] == 2000
    assert only_container(spec)["securityContext"]["runAsUser"] == 2001


def test_a_kept_cache_is_one_for_all_that_need_it() -> None:
    values = {"modelCache": {"persistence": {"enabled": True, "storageClassName": "shared"}}}
    rendered = render(values)
    (claim,) = of_kind(rendered, "PersistentVolumeClaim").values()
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert claim["spec"]["storageClassName"] == "shared"
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    named = {"name": "cache", "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}}
    assert _with(rendered, named) == {"draft", "target"}
    # A new gateway finds the tokenizer there while the hub is away.
    assert _with(render({**values, "model": "example/big"}), named) == SERVERS
    own = render({"modelCache": {"persistence": {"enabled": True, "existingClaim": "mine"}}})
    assert not of_kind(own, "PersistentVolumeClaim")


def _with(rendered: list[Manifest], volume: Manifest) -> set[str]:
    return {name for name, spec in pods(rendered).items() if volume in spec.get("volumes", [])}


@pytest.mark.parametrize(
    ("values", "source"),
    [
        (
            {"modelVolume": {"existingClaim": "models"}},
            {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
        ),
        (
            {"modelVolume": {"hostPath": "/mnt/models"}},
            {"hostPath": {"path": "/mnt/models", "type": "Directory"}},
        ),
        ({"modelImage": "models:1"}, {"image": {"reference": "models:1", "pullPolicy": "IfNotPresent"}}),
    ],
    ids=["claim", "directory", "image"],
)
def test_models_on_a_volume_are_read_only_and_everywhere(values: Manifest, source: Manifest) -> None:
    rendered = render({"model": "/models/volume/big", **values})
    for manifest in rendered:
        schemas.check(manifest)
    assert _with(rendered, {"name": "models", **source}) == SERVERS
    for role in SERVERS:
        mounts = only_container(pods(rendered)[role])["volumeMounts"]
        assert {"name": "models", "mountPath": "/models/volume", "readOnly": True} in mounts, role


def test_roles_may_have_images_of_their_own() -> None:
    values = {
        "modelImage": "big:1",
        "gateway": {"modelImage": "tokenizer:1"},
        "draft": {"modelImage": "small:1"},
    }
    for role, image in {"gateway": "tokenizer:1", "draft": "small:1", "target": "big:1"}.items():
        (volume,) = [it for it in pods(render(values))[role]["volumes"] if it["name"] == "models"]
        assert volume["image"]["reference"] == image


def test_image_volumes_need_a_kubernetes_that_has_them() -> None:
    values = {"modelImage": "big:1"}
    assert "image:" in helm("template", "galley", str(CHART), "--kube-version", "1.33.0", values=values)
    with pytest.raises(HelmFailed, match=r"modelImage: must be empty below Kubernetes 1\.33.* got v1\.32\.9"):
        helm("template", "galley", str(CHART), "--kube-version", "1.32.9", values=values)


KEPT = {"persistence": {"enabled": True, "size": "20Gi"}}
TRAINED = {"model": "example/head", "target_model": "example/big@abc"}
TWO_OF_ONE = {
    "modelSize": "9Gi",
    "draft": {"modelSize": "10Gi"},
    "drafts": [{"name": "a"}, {"name": "b"}],
    "modelCache": KEPT,
}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"modelCache": {"download": {"enabled": True}}}, "nothing to download"),
        (
            laid_over([HUB, {"modelCache": {"download": {"mode": "job"}}}]),
            "modelCache.download.mode: must be initContainer without modelCache.persistence.enabled",
        ),
        (
            {"modelImage": "big:1", "modelVolume": {"existingClaim": "models"}},
            "must have one source at /models/volume, got modelImage and modelVolume.existingClaim",
        ),
        (
            {"model": "example/7b", "modelSize": "15Gi"},
            "modelCache.sizeLimit: must be at least modelSize (15Gi), got 4Gi",
        ),
        (
            {"model": "example/7b", "modelSize": 15_200_000_000},
            "modelCache.sizeLimit: must be at least modelSize (15200000000), got 4Gi",
        ),
        (
            {"draft": {"modelSize": "4.1Gi", "settings": {"model": "example/small"}}},
            "modelCache.sizeLimit: must be at least draft.modelSize (4.1Gi), got 4Gi",
        ),
        (
            laid_over([HUB, {"modelSize": "19Gi", "draft": {"modelSize": "1.1Gi"}, "modelCache": KEPT}]),
            "modelCache.persistence.size: must be at least the sum of draft.modelSize and modelSize",
        ),
        (
            laid_over([HUB, {"modelSize": "3Gi", "draft": {"modelSize": "3Gi", "settings": TRAINED}}]),
            "modelCache.sizeLimit: must be at least draft.modelSize and modelSize (6442450944 bytes)",
        ),
        (
            {"modelImage": "big:1", "modelVolume": {"mountPath": "/tmp"}},
            "modelVolume.mountPath: must not be /tmp",
        ),
        (
            {"modelImage": "big:1", "modelVolume": {"mountPath": "/etc/galley/tls"}},
            "modelVolume.mountPath: must not be /etc/galley/tls",
        ),
        ({"modelImage": "big:1", "model": "example/big"}, "modelImage: must be empty with hub ids"),
        (
            {"gateway": {"modelImage": "tokenizer:1"}, "model": "example/big"},
            "gateway.modelImage: must be empty with the hub id example/big",
        ),
        (
            {"draft": {"modelImage": "small:1", "settings": {"model": "example/small"}}},
            "draft.modelImage: must be empty with the hub id example/small",
        ),
    ],
)
def test_models_that_cannot_be_had_are_refused(values: Manifest, reason: str) -> None:
    assert reason in render_refused(values)


@pytest.mark.parametrize(
    "values",
    [
        {"model": "example/1b", "modelSize": "4Gi"},
        {"model": "/models/volume/big", "modelSize": "141Gi", "modelVolume": {"existingClaim": "models"}},
        laid_over([HUB, {"modelSize": "19Gi", "draft": {"modelSize": "1Gi"}, "modelCache": KEPT}]),
        laid_over([HUB, TWO_OF_ONE]),
        {
            "model": "example/big",
            "modelImage": "small:1",
            "draft": {"settings": {"model": "/models/volume/small"}},
        },
        laid_over(
            [
                HUB,
                {
                    "modelSize": "1Ti",
                    "modelCache": {"persistence": {**KEPT["persistence"], "existingClaim": "m"}},
                },
            ]
        ),
    ],
)
def test_models_that_fit_are_accepted(values: Manifest) -> None:
    assert render(values)
