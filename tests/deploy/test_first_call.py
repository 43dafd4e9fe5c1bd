"""The first calls: what `helm test` runs, and what the notes say, is what the command takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

import pytest
import typer

from galley.cli.app import app
from galley.client.credentials import API_KEY_VARIABLE
from tests.deploy.matrix import TLS, laid_over
from tests.deploy.render import CHART, Manifest, env_of, helm, only_container, pods, render, workloads

WITH_ALL = laid_over(
    [
        {"tls": TLS},
        {"tls": {"gateway": {"clientCaSecretName": "callers"}}},
        {"auth": {"apiKeys": {"secretName": "keys"}}},
        {"test": {"apiKey": {"secretName": "mine"}, "clientCertSecretName": "my-cert"}},
    ]
)


def generate() -> Any:
    group: Any = typer.main.get_command(app)
    return group.commands["generate"]


def parsed(args: Sequence[str]) -> dict[str, Any]:
    actual: dict[str, Any] = generate().make_context("generate", list(args)).params
    return actual


def notes(values: Manifest, *flags: str) -> str:
    text = helm(
        "install", "proof", str(CHART), "--namespace", "galley", "--dry-run=client", *flags, values=values
    )
    return text.split("\nNOTES:\n")[1]


@pytest.mark.parametrize("values", [{}, WITH_ALL], ids=["plain", "with TLS and keys"])
def test_helm_test_runs_a_valid_command(values: Manifest) -> None:
    container = only_container(pods(render(values))["test"])
    command, *args = container["args"]
    assert command == "generate"
    actual = parsed(args)
    assert actual["prompt"] == "The ship's cook"
    assert actual["max_tokens"] == 8
    assert actual["chat"] is False, "not every model has a template for chats"
    assert actual["timeout"] == 60
    known = {parameter.envvar for parameter in generate().params} | {API_KEY_VARIABLE}
    assert {name for name in env_of(container) if name.startswith("GALLEY_")} <= known


@pytest.mark.parametrize("values", [{}, WITH_ALL], ids=["plain", "with TLS and keys"])
def test_notes_show_a_valid_command(values: Manifest) -> None:
    message = notes(values)
    (line,) = re.findall(r"^ *galley (generate .*)$", message.replace("\\\n", " "), re.MULTILINE)
    command, *args = shlex.split(line)
    assert command == "generate"
    actual = parsed(args)
    assert actual["endpoint"] == "127.0.0.1:50051"
    assert "service/proof-galley-gateway 50051" in message
    assert ("Callers need a key" in message) is bool(values)
    assert ("--tls-cert-file" in message) is bool(values)
    assert ("proof-galley-gateway.galley.svc" in message) is bool(values)


def test_notes_wait_for_the_progress_deadline() -> None:
    values = {"target": {"startupTimeoutSeconds": 3600}}
    patience = workloads(render(values))["gateway"]["spec"]["progressDeadlineSeconds"]
    assert f"--timeout {patience}s" in notes(values)


def test_notes_warn_of_open_access_and_trial_store() -> None:
    assert "Every caller that reaches the gateway is admitted" in notes({})
    assert "trial server" in notes({})
    closed = notes(
        {**WITH_ALL, "redis": {"embedded": {"enabled": False}, "existingSecret": {"name": "store"}}}
    )
    assert "Every caller" not in closed
    assert "trial server" not in closed
    assert "auth.idSecret" in notes({"gateway": {"replicas": 2}})
