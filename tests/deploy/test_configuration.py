"""What the manifests configure is what the code reads."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from tests.deploy.render import CHART, ROLES, ROOT, container, default_values, env, render, workloads
from tests.deploy.settings_of import parse_env, settings_of, variables_of

# What the chart decides by itself (a pod is one rank) or keeps for tests; what means nothing in a cluster.
CHART_DECIDES = {
    "gateway": {
        *("api_keys_file", "draft", "id_secret", "id_secret_file", "jwt_ca_file", "jwt_jwks_file", "model"),
        *("redis_url", "redis_url_file", "startup_timeout_s", "target"),
        *("peer_ca_file", "peer_cert_file", "peer_key_file", "target_tls_name", "draft_tls_name"),
    },
    "draft": {"advertise", "oracle_answers", "oracle_spoil", "redis_url", "redis_url_file", "tokenizer"},
    "target": {"advertise", "model", "redis_url", "redis_url_file", "tensor_parallel"},
}
CHART_DECIDES_FOR_ALL = {"drain_timeout_s", "health_port", "host", "log_format", "log_level", "port"} | {
    "tls_cert_file",
    "tls_client_ca_file",
    "tls_key_file",
}
NOT_IN_A_CLUSTER = {"die_with_parent", "ready_fd"}

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "own store": {
        "redis": {"embedded": {"enabled": False}, "existingSecret": {"name": "store"}},
        "gateway": {"idSecret": {"name": "ids"}, "apiKeys": {"name": "callers"}},
    },
    "a directory": {"model": "/models/other", "logLevel": "debug"},
    "hub models": {"model": "example/big", "draft": {"settings": {"model": "example/small"}}},
    "no draft": {"draft": {"enabled": False}},
}


def settings_of_schema(role: str) -> set[str]:
    schema = json.loads((CHART / "values.schema.json").read_text())
    return set(schema["properties"][role]["properties"]["settings"]["properties"])


def test_every_role_has_a_prefix_of_its_own() -> None:
    assert {role: settings_of(role).model_config["env_prefix"] for role in ROLES} == {
        "gateway": "GALLEY_GATEWAY_",
        "draft": "GALLEY_DRAFT_",
        "target": "GALLEY_TARGET_",
    }


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_every_variable_in_the_manifests_is_a_setting(values: dict[str, Any]) -> None:
    for role, workload in workloads(render(values)).items():
        given = {name for name in env(workload) if name.startswith("GALLEY_")}
        assert given <= (variables_of(role) if role in ROLES else set())
        # All configuration goes by the environment.
        assert role == "redis" or "args" not in container(workload)


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_the_services_accept_their_values(values: dict[str, Any]) -> None:
    for role, workload in workloads(render(values)).items():
        if role in ROLES:
            settings = parse_env(role, env(workload))
            assert settings.host == "0.0.0.0"
            assert settings.port == default_values()[role]["port"]


def test_committed_manifests_name_only_settings() -> None:
    for role in ROLES:
        documents = list(yaml.safe_load_all((ROOT / "deploy" / "k8s" / f"{role}.yaml").read_text()))
        for workload in workloads([document for document in documents if document]).values():
            assert {name for name in env(workload) if name.startswith("GALLEY_")} <= variables_of(role)


@pytest.mark.parametrize("role", ROLES)
def test_the_schema_offers_every_setting_that_is_not_the_charts(role: str) -> None:
    fields = set(settings_of(role).model_fields)
    assert settings_of_schema(role) == (
        fields - CHART_DECIDES[role] - CHART_DECIDES_FOR_ALL - NOT_IN_A_CLUSTER
    )


def test_target_gateway_and_draft_share_a_tokenizer() -> None:
    rendered = workloads(render({"model": "/models/other"}))
    assert env(rendered["target"])["GALLEY_TARGET_MODEL"] == "/models/other"
    assert env(rendered["gateway"])["GALLEY_GATEWAY_MODEL"] == "/models/other"
    assert env(rendered["draft"])["GALLEY_DRAFT_TOKENIZER"] == "/models/other"
    own = env(workloads(render(VARIANTS["hub models"]))["draft"])
    assert own["GALLEY_DRAFT_MODEL"] == "example/small"
    assert "GALLEY_DRAFT_TOKENIZER" not in own


@pytest.mark.parametrize("role", ROLES)
def test_settings_are_handed_on(role: str) -> None:
    values = {role: {"settings": {"max_message_bytes": 4_194_304}}}
    variable = f"GALLEY_{role.upper()}_MAX_MESSAGE_BYTES"
    assert env(workloads(render(values))[role])[variable] == "4194304"
