"""Every pair of the chart's big switches, and every example: valid for Kubernetes, closed, and consistent."""

from __future__ import annotations

from itertools import combinations, product

import jsonschema
import pytest

from tests.deploy import matrix, schemas
from tests.deploy.invariants import hold
from tests.deploy.render import CHART, EXAMPLES, Manifest, env_of, example, helm, of_kind, pods, render

ROWS = matrix.rows()
SECRETS = {"GALLEY_GATEWAY_ID_SECRET", "GALLEY_API_KEY", "HF_TOKEN"}
EXAMPLE_NAMES = [path.stem.removeprefix("values-") for path in EXAMPLES]


@pytest.mark.parametrize("row", ROWS, ids=[", ".join(row.values()) for row in ROWS])
def test_a_combination_is_valid_closed_and_consistent(row: matrix.Row) -> None:
    manifests = render(matrix.values_of(row))
    for manifest in manifests:
        schemas.check(manifest)
    hold(manifests)


@pytest.mark.parametrize("name", EXAMPLE_NAMES)
def test_an_example_is_valid_closed_and_consistent(name: str) -> None:
    manifests = render(example(name))
    for manifest in manifests:
        schemas.check(manifest)
    hold(manifests)


def test_the_examples_are_those_that_are_promised() -> None:
    assert EXAMPLE_NAMES == ["laptop", "llama70b-tp4", "multi-node", "one-gpu"]


@pytest.mark.parametrize("name", EXAMPLE_NAMES)
def test_who_gets_gpus_in_an_example_can_use_them(name: str) -> None:
    """Their image is built for them, the device is theirs, and the taint that such nodes bear tolerated."""
    for pod, spec in pods(render(example(name))).items():
        for container in spec["containers"]:
            if "nvidia.com/gpu" not in container["resources"]["limits"]:
                assert "-cuda" not in container["image"], pod
                continue
            assert "-cuda:" in container["image"], pod
            assert env_of(container)[f"GALLEY_{pod.split('-')[0].upper()}_DEVICE"] == "cuda", pod
            assert "nvidia.com/gpu" in {one["key"] for one in spec["tolerations"]}, pod


def test_lint_is_clean_with_every_example() -> None:
    for values in ({}, *(example(name) for name in EXAMPLE_NAMES)):
        assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART), values=values)


def test_every_pair_of_settings_is_in_a_combination() -> None:
    had = {pair for row in ROWS for pair in combinations(row.items(), 2)}
    for first, second in combinations(matrix.SWITCHES, 2):
        for one, other in product(matrix.SWITCHES[first], matrix.SWITCHES[second]):
            pair = ((first, one), (second, other))
            assert (pair in had) is matrix.possible(dict(pair)), pair


def test_custom_resources_are_read_strictly() -> None:
    schemas.need_crds()
    seen: dict[str, Manifest] = {}
    for row in ROWS:
        for manifest in render(matrix.values_of(row)):
            if schemas.is_custom(manifest):
                seen.setdefault(manifest["kind"], manifest)
    assert set(seen) == {
        "GRPCRoute",
        "LeaderWorkerSet",
        "PodMonitor",
        "PrometheusRule",
        "RayService",
        "ScaledObject",
        "ServiceMonitor",
    }
    for kind, manifest in seen.items():
        schemas.check(manifest)
        manifest["spec"]["nonsense"] = 1
        with pytest.raises(jsonschema.ValidationError, match="nonsense"):
            schemas.check(manifest)
        assert kind == manifest["kind"]


@pytest.mark.parametrize("name", ["Deployment", "NetworkPolicy"])
def test_kubernetes_own_kinds_are_read_strictly(name: str) -> None:
    manifest = next(iter(of_kind(render(), name).values()))
    manifest["spec"]["nonsense"] = 1
    with pytest.raises(jsonschema.ValidationError, match="nonsense"):
        schemas.check(manifest)


@pytest.mark.parametrize("name", EXAMPLE_NAMES)
def test_no_secret_stands_in_a_manifest(name: str) -> None:
    """What is secret comes by reference: the values of the examples hold none, and none is made."""
    manifests = render(example(name))
    assert not of_kind(manifests, "Secret")
    for spec in pods(manifests).values():
        for container in spec["containers"]:
            for entry in container.get("env", []):
                if entry["name"] in SECRETS:
                    assert "secretKeyRef" in entry.get("valueFrom", {}), entry
                assert "@" not in entry.get("value", ""), "a password in a URL"
