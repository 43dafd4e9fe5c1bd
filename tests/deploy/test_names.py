"""Names that Kubernetes takes, whatever the release is called, and images from a registry of one's own."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.deploy import schemas
from tests.deploy.render import (
    CHART,
    ROLES,
    Manifest,
    container,
    helm,
    of_kind,
    pods,
    render,
    render_refused,
    services,
    workloads,
)

_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
"""A Service's name (RFC 1035)."""
_ALL_KINDS: list[dict[str, Any]] = [
    {},
    {"kind": "leaderworkerset", "nodes": 2, "tensorParallel": 2},
    {"kind": "rayservice"},
]
LONG = "a-team-with-a-long-name-and-its-very-own-stage-of-test"[:53]


def names(release: str, values: Manifest | None = None) -> set[str]:
    return {manifest["metadata"]["name"] for manifest in render(values, release)}


@pytest.mark.parametrize("release", ["prod.v1", "1st", "123", LONG, "galley.v1", "0-galley", "1e5"])
def test_a_release_of_any_name_has_valid_objects(release: str) -> None:
    for target in _ALL_KINDS:
        manifests = render({"target": target}, release)
        for manifest in manifests:
            schemas.check(manifest)
            assert manifest["metadata"]["labels"]["app.kubernetes.io/instance"] == release
        for name in services(manifests):
            assert _LABEL.fullmatch(name), name
        assert all(len(name) <= 63 - len("-0123456789") for name in workloads(manifests))


@pytest.mark.parametrize(
    ("one", "other"),
    [("prod.v1", "prod-v1"), ("1st", "g-1st"), (LONG, LONG[:-1] + "x"), ("galley.v1", "galley-v1")],
)
def test_two_releases_of_a_namespace_share_no_name(one: str, other: str) -> None:
    assert not names(one) & names(other)


@pytest.mark.parametrize(
    ("release", "values", "expected"),
    [
        ("galley", {}, "galley-gateway"),
        ("my-galley", {}, "my-galley-gateway"),
        ("proof", {}, "proof-galley-gateway"),
        ("proof", {"nameOverride": "llm"}, "proof-llm-gateway"),
        ("llm-1", {"nameOverride": "llm"}, "llm-1-gateway"),
        ("proof", {"fullnameOverride": "serving"}, "serving-gateway"),
    ],
)
def test_names_can_be_chosen(release: str, values: Manifest, expected: str) -> None:
    manifests = render(values, release)
    assert expected in services(manifests)
    chosen = expected.removesuffix("-gateway")
    assert all(manifest["metadata"]["name"].startswith(chosen) for manifest in manifests)


def test_the_name_label_follows_the_name() -> None:
    manifests = render({"nameOverride": "llm"})
    assert {each["metadata"]["labels"]["app.kubernetes.io/name"] for each in manifests} == {"llm"}


@pytest.mark.parametrize("name", ["Upper", "1st", "prod.v1", "-a", "a" * 41])
def test_a_name_that_no_service_could_have_is_refused(name: str) -> None:
    for key in ("fullnameOverride", "nameOverride"):
        assert f"/{key}" in render_refused({key: name})


def test_a_namespace_of_digits_is_text() -> None:
    text = helm("template", "galley", str(CHART), "--namespace", "123")
    assert 'namespace: "123"' in text
    assert "namespace: 123" not in text


MIRROR = {"global": {"imageRegistry": "mirror.example.com:5000"}}


def images(values: Manifest) -> dict[str, str]:
    return {name: spec["containers"][0]["image"] for name, spec in pods(render(values)).items()}


def test_the_global_registry_is_that_of_all_images() -> None:
    """As in bitnami's charts, it replaces the registry of every image."""
    found = images({**MIRROR, "image": {"registry": "registry.example.com/team", "tag": "1"}})
    for role in ROLES:
        assert found[role] == f"mirror.example.com:5000/galley-{role}:1"
    assert found["test"] == found["gateway"]
    assert found["redis"] == "mirror.example.com:5000/valkey/valkey:9.1"


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("valkey/valkey:9", "mirror.example.com:5000/valkey/valkey:9"),
        ("localhost/valkey:9", "mirror.example.com:5000/valkey:9"),
        ("registry:80/valkey@sha256:00", "mirror.example.com:5000/valkey@sha256:00"),
    ],
)
def test_the_global_registry_replaces_only_a_registry(image: str, expected: str) -> None:
    assert images({**MIRROR, "redis": {"embedded": {"image": image}}})["redis"] == expected


def test_an_umbrella_charts_other_globals_and_secrets_are_taken() -> None:
    values = {
        "global": {"imagePullSecrets": ["all", {"name": "more"}], "storageClass": "fast"},
        "imagePullSecrets": [{"name": "own"}, {"name": "more"}],
    }
    for name, spec in pods(render(values)).items():
        assert spec["imagePullSecrets"] == [{"name": "all"}, {"name": "more"}, {"name": "own"}], name
    assert "/global/imageRegistry" in render_refused({"global": {"imageRegistry": 5}})


@pytest.mark.parametrize("cpu", [0.5, 2, "500m", "1.5"])
def test_quantities_may_be_numbers(cpu: float | str) -> None:
    manifests = render({"gateway": {"resources": {"requests": {"cpu": cpu, "memory": "1Gi"}}}})
    assert container(workloads(manifests)["gateway"])["resources"]["requests"]["cpu"] == cpu
    for manifest in manifests:
        schemas.check(manifest)


@pytest.mark.parametrize("cpu", ["a lot", "5 m", -1, True])
def test_what_is_no_quantity_is_refused(cpu: object) -> None:
    assert "/gateway/resources/requests/cpu" in render_refused(
        {"gateway": {"resources": {"requests": {"cpu": cpu}}}}
    )


def test_accounts_are_found_in_the_names() -> None:
    manifests = render(release="prod.v1")
    hold_names = of_kind(manifests, "ServiceAccount")
    assert {spec["serviceAccountName"] for spec in pods(manifests).values()} <= set(hold_names)
