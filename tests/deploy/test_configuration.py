"""The manifests set variables that the code reads, and all that it needs."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import pytest

from galley.common.config.settings import ServiceSettings
from scripts.chart_schema import DECIDED, NOT_IN_A_CLUSTER, offered, settings_of
from tests.deploy import matrix
from tests.deploy.render import (
    CHART,
    EXAMPLES,
    ROLES,
    Manifest,
    env,
    env_of,
    example,
    pods,
    render,
)
from tests.deploy.render import workloads as workloads_of
from tests.deploy.settings_of import parse_env

VARIANTS = [
    *(matrix.values_of(row) for row in matrix.rows()),
    *(example(path.stem.removeprefix("values-")) for path in EXAMPLES),
]
# What the chart leaves to the defaults: secrets come by reference, without a file of their own, and replicas
# are not named but register.
LEFT = {"id_secret_file", "redis_url_file", "target"}
# Kubernetes fills these in.
FILLED = {
    "GALLEY_GATEWAY_ID_SECRET": "0" * 64,
    "GALLEY_TARGET_HOST_INDEX": "0",
    **{f"GALLEY_{role.upper()}_REDIS_URL": "redis://store:6379/0" for role in ROLES},
}


def galley_pods(values: Manifest) -> dict[str, dict[str, str]]:
    return {
        role: env_of(spec["containers"][0]) for role, spec in pods(render(values)).items() if role in ROLES
    }


@functools.cache
def environments() -> list[dict[str, dict[str, str]]]:
    return [galley_pods(values) for values in VARIANTS]


def as_filled_in(given: Mapping[str, str]) -> dict[str, str]:
    ours = {name: value for name, value in given.items() if name.startswith("GALLEY_")}
    return {name: value or FILLED[name] for name, value in ours.items()}


def test_every_role_has_a_prefix_of_its_own() -> None:
    assert {role: settings_of(role).model_config["env_prefix"] for role in ROLES} == {
        "gateway": "GALLEY_GATEWAY_",
        "draft": "GALLEY_DRAFT_",
        "target": "GALLEY_TARGET_",
    }


def test_chart_sets_what_it_does_not_offer() -> None:
    """Otherwise nobody could: such a setting is not offered as one of `settings`."""
    for role in ROLES:
        prefix = settings_of(role).model_config["env_prefix"]
        ever = set().union(*(actual.get(role, ()) for actual in environments()))
        kept = (DECIDED - LEFT) & set(settings_of(role).model_fields) - set(offered(role))
        assert {f"{prefix}{name}".upper() for name in kept} <= ever, role


@pytest.mark.parametrize("kind", ["statefulset", "rayservice"])
@pytest.mark.parametrize("release", ["galley", "blue"])
def test_the_roles_of_a_release_share_a_pool_of_its_own(kind: str, release: str) -> None:
    rendered = pods(render({"target": {"kind": kind}}, release))
    found = {role: env_of(rendered[role]["containers"][0])[f"GALLEY_{role.upper()}_POOL"] for role in ROLES}
    assert found == dict.fromkeys(ROLES, f"galley.{release}")


def settings_of_values(role: str, values: Manifest) -> ServiceSettings:
    return parse_env(role, as_filled_in(galley_pods(values)[role]))


@pytest.mark.parametrize("role", ROLES)
def test_the_schema_offers_every_setting_that_is_not_the_charts(role: str) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    actual = schema["properties"][role]["properties"]["settings"]["properties"]
    assert actual == offered(role), "run `make chart-schema`"
    assert set(actual) | DECIDED | NOT_IN_A_CLUSTER >= set(settings_of(role).model_fields)


def test_target_gateway_and_draft_share_a_tokenizer() -> None:
    rendered = workloads_of(render({"model": "/models/other"}))
    assert env(rendered["target"])["GALLEY_TARGET_MODEL"] == "/models/other"
    assert env(rendered["gateway"])["GALLEY_GATEWAY_MODEL"] == "/models/other"
    assert env(rendered["draft"])["GALLEY_DRAFT_TOKENIZER"] == "/models/other"
    own = env(
        workloads_of(render({"model": "example/big", "draft": {"settings": {"model": "example/small"}}}))[
            "draft"
        ]
    )
    assert own["GALLEY_DRAFT_MODEL"] == "example/small"
    assert "GALLEY_DRAFT_TOKENIZER" not in own


@pytest.mark.parametrize("role", ROLES)
def test_settings_are_handed_on(role: str) -> None:
    values: dict[str, Any] = {role: {"settings": {"max_message_bytes": 4_194_304}}}
    variable = f"GALLEY_{role.upper()}_MAX_MESSAGE_BYTES"
    assert env(workloads_of(render(values))[role])[variable] == "4194304"
    assert settings_of_values(role, values).max_message_bytes == 4_194_304


def test_further_environment_is_for_all_or_for_one() -> None:
    values = {
        "extraEnv": [{"name": "FOR_ALL", "value": "1"}],
        "draft": {"extraEnv": [{"name": "FOR_DRAFTS", "value": "1"}]},
    }
    rendered = workloads_of(render(values))
    assert all("FOR_ALL" in env(rendered[role]) for role in ROLES)
    assert [role for role in ROLES if "FOR_DRAFTS" in env(rendered[role])] == ["draft"]
