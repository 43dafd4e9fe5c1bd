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
    """The command `galley generate`."""
    group: Any = typer.main.get_command(app)
    return group.commands["generate"]


def parsed(args: Sequence[str]) -> dict[str, Any]:
    """What the command makes of these arguments; raises a UsageError where it makes nothing of them."""
    told: dict[str, Any] = generate().make_context("generate", list(args)).params
    return told


def notes(values: Manifest, *flags: str) -> str:
    """What helm prints."""
    text = helm(
        "install", "proof", str(CHART), "--namespace", "galley", "--dry-run=client", *flags, values=values
    )
    return text.split("\nNOTES:\n")[1]


@pytest.mark.parametrize("values", [{}, WITH_ALL], ids=["plain", "with TLS and keys"])
def test_the_test_asks_in_a_way_that_the_command_takes(values: Manifest) -> None:
    container = only_container(pods(render(values))["test"])
    command, *args = container["args"]
    assert command == "generate"
    told = parsed(args)
    assert told["prompt"] == "The ship's cook"
    assert told["max_tokens"] == 8
    assert told["chat"] is False, "not every model has a template for chats"
    assert told["timeout"] == 60
    known = {parameter.envvar for parameter in generate().params} | {API_KEY_VARIABLE}
    assert {name for name in env_of(container) if name.startswith("GALLEY_")} <= known


@pytest.mark.parametrize("values", [{}, WITH_ALL], ids=["plain", "with TLS and keys"])
def test_the_notes_say_a_first_call_that_the_command_takes(values: Manifest) -> None:
    said = notes(values)
    (line,) = re.findall(r"^ *galley (generate .*)$", said.replace("\\\n", " "), re.MULTILINE)
    command, *args = shlex.split(line)
    assert command == "generate"
    told = parsed(args)
    assert told["endpoint"] == "127.0.0.1:50051"
    assert "service/proof-galley-gateway 50051" in said
    assert ("Callers need a key" in said) is bool(values)
    assert ("--tls-cert-file" in said) is bool(values)
    assert ("proof-galley-gateway.galley.svc" in said) is bool(values)


def test_the_notes_wait_as_long_as_the_gateways_may_take() -> None:
    values = {"target": {"startupTimeoutSeconds": 3600}}
    patience = workloads(render(values))["gateway"]["spec"]["progressDeadlineSeconds"]
    assert f"--timeout {patience}s" in notes(values)


def test_the_notes_warn_of_what_is_open_or_for_trials() -> None:
    assert "Everyone who reaches the gateway may call" in notes({})
    assert "trial server" in notes({})
    closed = notes(
        {**WITH_ALL, "redis": {"embedded": {"enabled": False}, "existingSecret": {"name": "store"}}}
    )
    assert "Everyone" not in closed
    assert "trial server" not in closed
    assert "auth.idSecret" in notes({"gateway": {"replicas": 2}})
