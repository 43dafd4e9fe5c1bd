"""Every pair of the chart's big switches, and every example: valid for Kubernetes, closed, and consistent."""

from __future__ import annotations

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


@pytest.mark.parametrize("name", EXAMPLE_NAMES)
def test_pods_with_gpus_can_use_them(name: str) -> None:
    for pod, spec in pods(render(example(name))).items():
        for container in spec["containers"]:
            if "nvidia.com/gpu" not in container["resources"]["limits"]:
                # The Job that downloads has the target's image.
                assert "-cuda" not in container["image"] or pod == "download", pod
                continue
            assert "-cuda:" in container["image"], pod
            assert env_of(container)[f"GALLEY_{pod.split('-')[0].upper()}_DEVICE"] == "cuda", pod
            assert "nvidia.com/gpu" in {one["key"] for one in spec["tolerations"]}, pod


def test_lint_is_clean_with_every_example() -> None:
    for values in ({}, *(example(name) for name in EXAMPLE_NAMES)):
        assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART), values=values)


def test_custom_resources_are_read_strictly() -> None:
    schemas.need_crds()
    seen: dict[str, Manifest] = {}
    for row in ROWS:
        for manifest in render(matrix.values_of(row)):
            if schemas.is_custom(manifest):
                seen.setdefault(manifest["kind"], manifest)
    assert set(seen) == {
        "BackendTLSPolicy",
        "Certificate",
        "GRPCRoute",
        "HTTPRoute",
        "InferencePool",
        "Issuer",
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


@pytest.mark.parametrize("name", EXAMPLE_NAMES)
def test_no_secret_stands_in_a_manifest(name: str) -> None:
    manifests = render(example(name))
    assert not of_kind(manifests, "Secret")
    for spec in pods(manifests).values():
        for container in spec["containers"]:
            for entry in container.get("env", []):
                if entry["name"] in SECRETS:
                    assert "secretKeyRef" in entry.get("valueFrom", {}), entry
                assert "@" not in entry.get("value", ""), "a password in a URL"
