"""draft.canary: a second pool of drafts, whose version gateways try on a share of the sessions."""

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
from tests.deploy.test_network import DRAFT, REDIS, openings

CANARY: dict[str, Any] = {
    "draft": {
        "replicas": 3,
        "settings": {"model": "example/small", "version": "v1", "max_sessions": 7},
        "canary": {
            "enabled": True,
            "version": "v2",
            "share": 0.1,
            "overrides": {"settings": {"model": "example/other"}, "nodeSelector": {"pool": "canary"}},
        },
    }
}


def test_the_canary_is_the_draft_with_its_overrides() -> None:
    rendered = render(CANARY)
    hold(rendered)
    for manifest in rendered:
        schemas.check(manifest)
    own, canary = (workloads(rendered)[name] for name in ("draft", "draft-canary"))
    assert canary["metadata"]["name"] == "galley-draft-canary"
    assert (own["spec"]["replicas"], canary["spec"]["replicas"]) == (3, 1)
    assert pod(canary)["nodeSelector"] == {"pool": "canary"}
    different = {
        name: (env(own).get(name), value)
        for name, value in env(canary).items()
        if env(own).get(name) != value
    }
    assert different == {
        "GALLEY_DRAFT_MODEL": ("example/small", "example/other"),
        "GALLEY_DRAFT_VERSION": ("v1", "v2"),
    }
    assert container(canary)["image"] == container(own)["image"]
    assert pod(canary)["serviceAccountName"] == pod(own)["serviceAccountName"]


def test_gateways_try_the_version_on_its_share() -> None:
    assert env(workloads(render(CANARY))["gateway"])["GALLEY_GATEWAY_DRAFT_SPLIT"] == "v2=0.1"
    off = laid_over([CANARY, {"draft": {"canary": {"enabled": False}}}])
    rendered = render(off)
    assert "GALLEY_GATEWAY_DRAFT_SPLIT" not in env(workloads(rendered)["gateway"])
    assert "draft-canary" not in workloads(rendered)


@pytest.mark.parametrize("pools", [{}, {"drafts": [{"name": "a"}, {"name": "b"}]}])
def test_no_pool_takes_the_pods_of_the_canary(pools: Manifest) -> None:
    """The selector of a Deployment cannot be changed, so that of `draft` has to leave the canary out."""
    rendered = render(laid_over([CANARY, pools]))
    labels = {
        name: template["metadata"]["labels"]
        for name, template in pod_templates(rendered).items()
        if name.startswith("draft")
    }
    selectors = [
        (component(it), it["spec"]["selector"].get("matchLabels", it["spec"]["selector"]))
        for kind in ("Deployment", "Service", "PodDisruptionBudget")
        for it in of_kind(rendered, kind).values()
        if component(it).startswith("draft")
    ]
    assert len(selectors) == 3 * len(labels)
    for name, selector in selectors:
        assert [each for each, own in labels.items() if selector.items() <= own.items()] == [name]


def test_its_policy_admits_what_that_of_the_drafts_admits() -> None:
    rendered = render(CANARY)
    for side in ("ingress", "egress"):
        assert openings(rendered, "draft-canary", side) == openings(rendered, "draft", side)
    assert ("draft-canary", DRAFT) in openings(rendered, "gateway", "egress")
    assert ("draft-canary", REDIS) in openings(rendered, "redis", "ingress")


def test_prometheus_scrapes_it() -> None:
    rendered = render({**CANARY, "monitoring": {"scrape": "podMonitor"}})
    (monitor,) = of_kind(rendered, "PodMonitor").values()
    (choice,) = monitor["spec"]["selector"]["matchExpressions"]
    assert choice["values"] == ["gateway", "draft", "draft-canary", "target"]


def test_it_is_not_scaled_and_does_not_count_where_drafts_are() -> None:
    rendered = render({**CANARY, "keda": KEDA})
    hold(rendered)
    assert "galley-draft-canary" not in of_kind(rendered, "ScaledObject")
    (_, age) = of_kind(rendered, "ScaledObject")["galley-draft"]["spec"]["triggers"]
    assert 'pod=~"galley-draft-[a-z0-9]+-[a-z0-9]+"' in age["metadata"]["query"]
    by_cpu = render(laid_over([CANARY, {"draft": {"autoscaling": {"enabled": True}}}]))
    hold(by_cpu)
    assert set(of_kind(by_cpu, "HorizontalPodAutoscaler")) == {"galley-draft"}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (
            {"keda": KEDA, "fullnameOverride": "n" * 34},
            "draft.canary.enabled: must give objects a name of at most 46 characters with keda.enabled, got",
        ),
        ({"draft": {"canary": {"version": ""}}}, "version"),
        ({"draft": {"canary": {"version": "a=b"}}}, "version"),
        ({"draft": {"canary": {"share": 0.6}}}, "share"),
        ({"draft": {"canary": {"overrides": {"port": 1}}}}, "port"),
        ({"draft": {"canary": {"overrides": {"settings": {"version": "x"}}}}}, "version"),
        ({"draft": {"settings": {"version": "v2"}}}, "draft.canary.version: must differ from draft.settings"),
        ({"drafts": [{"name": "canary"}]}, "drafts[canary].name: must not be canary"),
        ({"draft": {"enabled": False}}, "draft.canary.enabled: must be false with draft.enabled false"),
        (
            {"gateway": {"settings": {"draft_split": "x=0.1"}}},
            "gateway.settings.draft_split: must be empty with draft.canary.enabled",
        ),
        (
            {"draft": {"canary": {"overrides": {"hostNetwork": True}}}},
            "networkPolicy.enabled: must be false with draft.canary.overrides.hostNetwork",
        ),
    ],
)
def test_canaries_that_cannot_work_are_refused(values: Manifest, reason: str) -> None:
    assert reason in render_refused(laid_over([CANARY, values]))
