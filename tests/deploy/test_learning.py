"""learning: a pod that trains drafts on the traffic, off by default."""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer
from typer.main import get_command

from galley.cli.distill import distill
from tests.deploy import schemas
from tests.deploy.invariants import hold
from tests.deploy.matrix import OWN_STORE, TLS, laid_over
from tests.deploy.render import (
    CHART,
    Manifest,
    container,
    env,
    of_kind,
    pod,
    render,
    render_refused,
    workloads,
)
from tests.deploy.test_network import DNS, DRAFT, HTTPS, REDIS, openings

LEARNING: dict[str, Any] = {
    "gateway": {"settings": {"learn_tokens": 500_000}},
    "draft": {"replicas": 2, "settings": {"model": "/models/volume/draft", "max_load_mib": 64}},
    "learning": {
        "enabled": True,
        "start": "/models/volume/draft",
        "options": {"cycle_tokens": 2_000_000, "share": 0.05},
    },
}
WORK = "/var/lib/galley/learning"


def test_nothing_learns_by_default() -> None:
    rendered = render()
    assert "learning" not in workloads(rendered)
    assert "GALLEY_GATEWAY_LEARN_TOKENS" not in env(workloads(rendered)["gateway"])


def test_one_pod_learns_with_a_volume_of_its_own() -> None:
    rendered = render(LEARNING)
    hold(rendered)
    for manifest in rendered:
        schemas.check(manifest)
    learning = workloads(rendered)["learning"]
    assert (learning["kind"], learning["spec"]["replicas"]) == ("Deployment", 1)
    assert learning["spec"]["strategy"] == {"type": "Recreate"}
    main = container(learning)
    assert main["command"] == ["python", "-m", "galley.cli", "distill", WORK]
    assert main["args"] == [
        *("--follow", "--target", "/models/default", "--start", "/models/volume/draft"),
        *("--cycle-tokens", "2000000", "--share", "0.05"),
    ]
    assert env(learning) == {
        "GALLEY_LEARNING_REDIS_URL": f"redis://galley-redis:{REDIS}/0",
        "GALLEY_LEARNING_POOL": env(workloads(rendered)["gateway"])["GALLEY_GATEWAY_POOL"],
    }
    [volume] = [one for one in pod(learning)["volumes"] if one["name"] == "learning"]
    claim = of_kind(rendered, "PersistentVolumeClaim")[volume["persistentVolumeClaim"]["claimName"]]
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    served = {"learning": {"start": ""}, "draft": {"settings": {"model": "/models/volume/own"}}}
    assert (
        "/models/volume/own"
        in container(workloads(render(laid_over([LEARNING, served])))["learning"])["args"]
    )
    given = render(laid_over([LEARNING, {"learning": {"persistence": {"existingClaim": "mine"}}}]))
    assert not of_kind(given, "PersistentVolumeClaim")


def test_the_name_of_the_version_that_replicas_begin_with_is_passed_on() -> None:
    def started(*values: Manifest) -> list[str]:
        args = container(workloads(render(laid_over([LEARNING, *values])))["learning"])["args"]
        return [args[at + 1] for at, flag in enumerate(args) if flag == "--start-version"]

    named = {"draft": {"settings": {"version": "v1"}}}
    assert started() == []
    assert started(named) == ["v1"]
    assert started(named, {"learning": {"options": {"start_version": "of-a-pool"}}}) == ["of-a-pool"]
    assert started(named, {"learning": {"start": "/other"}}) == [], "the name of another draft"


def test_every_option_is_a_flag_of_the_command() -> None:
    app = typer.Typer()
    app.command()(distill)
    flags = {option for parameter in get_command(app).params for option in parameter.opts}
    options = json.loads((CHART / "values.schema.json").read_text())["properties"]["learning"]
    names = options["properties"]["options"]["properties"]
    assert {f"--{name.replace('_', '-')}" for name in names} <= flags
    given = {"options": {name: 1 for name in names if names[name].get("type") == "integer"}}
    assert container(workloads(render(laid_over([LEARNING, {"learning": given}])))["learning"])["args"]


def test_it_reaches_drafts_and_store_and_nobody_reaches_it() -> None:
    rendered = render(LEARNING)
    assert openings(rendered, "learning", "ingress") == set()
    assert openings(rendered, "learning", "egress") == {
        ("draft", DRAFT),
        ("redis", REDIS),
        ("kube-dns", DNS),
    }
    assert ("learning", DRAFT) in openings(rendered, "draft", "ingress")
    assert ("learning", REDIS) in openings(rendered, "redis", "ingress")


def test_a_model_of_the_hub_is_downloaded_whole() -> None:
    hub = {"model": "example/model", "modelCache": {"download": {"enabled": True}}}
    rendered = render(laid_over([LEARNING, hub]))
    [download] = pod(workloads(rendered)["learning"])["initContainers"]
    assert download["command"][-1] == "example/model"
    assert env(workloads(rendered)["learning"])["HF_HUB_OFFLINE"] == "1"
    assert any(port == HTTPS for _, port in openings(rendered, "learning", "egress"))


def test_it_calls_drafts_as_gateways_do_and_the_store_by_a_user_of_its_own() -> None:
    redis = {**OWN_STORE, "existingSecret": {"name": "store", "key": "url", "learningKey": "ops"}}
    rendered = render(laid_over([LEARNING, {"tls": {**TLS, "mutual": True}, "redis": redis}]))
    hold(rendered)
    learning, gateway = workloads(rendered)["learning"], workloads(rendered)["gateway"]
    peers = {name: value for name, value in env(gateway).items() if "PEER" in name or "DRAFT_TLS" in name}
    assert len(peers) == 4
    assert peers.items() <= env(learning).items()
    [url] = [one for one in container(learning)["env"] if one["name"] == "GALLEY_LEARNING_REDIS_URL"]
    assert url["valueFrom"]["secretKeyRef"] == {"name": "store", "key": "ops"}
    secrets = {one["secret"]["secretName"] for one in pod(learning)["volumes"] if "secret" in one}
    assert secrets == {"gateway-tls"}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"gateway": {"settings": {"learn_tokens": 0}}}, "gateway.settings.learn_tokens: must be above 0"),
        (
            {"draft": {"settings": {"max_load_mib": 0}}},
            "draft.settings.max_load_mib: must be above 0 with learning.enabled",
        ),
        ({"draft": {"enabled": False}}, "learning.enabled: must be false with draft.enabled false"),
        ({"learning": {"start": "example/draft"}}, "learning.start: must be a directory"),
        ({"learning": {"options": {"layers": 3}}}, "layers"),
        (
            {"learning": {"hostNetwork": True}},
            "networkPolicy.enabled: must be false with learning.hostNetwork",
        ),
    ],
)
def test_learning_that_cannot_work_is_refused(values: Manifest, reason: str) -> None:
    assert reason in render_refused(laid_over([LEARNING, values]))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (
            {"draft": {"settings": {"max_load_mib": 64}}},
            "draft.settings.max_load_mib: must be 0 without draft.settings.model",
        ),
        (
            {"drafts": [{"name": "b", "settings": {"model": "/models/volume/b", "max_load_mib": 64}}]},
            "learning.start: must be set, because draft.settings.model is empty",
        ),
    ],
)
def test_drafts_without_a_model_do_not_learn(values: Manifest, reason: str) -> None:
    learning = {"gateway": LEARNING["gateway"], "learning": {"enabled": True}}
    assert reason in render_refused(laid_over([learning, values]))
