"""The first calls: what `helm test` runs, and what the notes say, is what the command takes."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Sequence
from typing import Any

import pytest
import typer
from google.protobuf.json_format import Parse as ParseJson

from galley.cli.app import app
from galley.client.credentials import API_KEY_VARIABLE
from galley.pb.galley.v1 import galley_pb2 as pb
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
WITH_KEYS = {"tls": TLS, "auth": {"apiKeys": {"secretName": "keys"}}}
WITH_PUBLIC = laid_over(
    [
        {"tls": TLS},
        {"tls": {"gateway": {"publicAuthority": True, "name": "g.example.com", "peerSecretName": "peer"}}},
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


@pytest.mark.parametrize("values", [{}, WITH_ALL, WITH_PUBLIC], ids=["plain", "with all", "public"])
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


def commands(values: Manifest) -> dict[str, list[str]]:
    """Return the arguments of the commands in the notes by program; the last of each."""
    text = notes(values).replace("\\\n", " ")
    lines = re.findall(
        r"^  (?:printf .* \| )?(kubectl|helm|grpcurl|curl) (.*?)( &| > .*)?$", text, re.MULTILINE
    )
    return {f"{name} {shlex.split(rest)[2]}": shlex.split(rest) for name, rest, _ in lines}


def request_of(args: list[str]) -> str:
    return args[args.index("-d") + 1]


@pytest.mark.parametrize("values", [{}, WITH_KEYS, WITH_PUBLIC], ids=["plain", "with keys", "public"])
def test_notes_call_from_inside_a_pod(values: Manifest) -> None:
    args = commands(values)["kubectl exec"]
    place = ["deployment/proof-galley-gateway", "-c", "gateway"]
    assert args[: args.index("--")] == ["-n", "galley", "exec", *(["-i"] if "auth" in values else []), *place]
    given = args[args.index("--") + 1 :]
    start = given.index("python")
    assert given[start : start + 4] == ["python", "-m", "galley.cli", "generate"]
    actual = parsed(given[start + 4 :])
    assert actual["endpoint"] == "localhost:50051", "also where a pod has no IPv4 address"
    tls = values.get("tls", {}).get("gateway", {})
    mounts = {mount["mountPath"] for mount in only_container(pods(render(values))["gateway"])["volumeMounts"]}
    assert actual["tls"] is bool(tls.get("publicAuthority"))
    if tls and not actual["tls"]:
        assert actual["tls_ca_file"].rpartition("/")[0] in mounts
    assert bool(actual["tls_server_name"]) is bool(tls)


def test_notes_give_a_key_to_a_pod_by_standard_input() -> None:
    """The arguments of `kubectl exec` are in the URL of its request, and so in the cluster's audit log."""
    args = commands(WITH_KEYS)["kubectl exec"]
    assert not [arg for arg in args if "$KEY" in arg]
    assert """printf %s "$KEY" | kubectl""" in notes(WITH_KEYS)
    given = args[args.index("--") + 1 :]
    show = ["printenv", API_KEY_VARIABLE]
    wrapper = given[: given.index("python")]
    shown = subprocess.run([*wrapper, *show], input=b"my key", capture_output=True, check=True)
    assert shown.stdout == b"my key\n"
    assert not notes({}).count("printf")


def test_notes_call_from_inside_no_pod_that_lacks_a_certificate() -> None:
    assert "kubectl exec" not in commands(WITH_ALL)
    assert "client.crt and client.key are yours" in notes(WITH_ALL)


@pytest.mark.parametrize("values", [{}, WITH_ALL, WITH_PUBLIC], ids=["plain", "with all", "public"])
def test_notes_call_from_outside(values: Manifest) -> None:
    known = commands(values)
    assert known["kubectl port-forward"][3:] == ["service/proof-galley-gateway", "50051", "8000"]
    (grpcurl,) = (args for name, args in known.items() if name.startswith("grpcurl"))
    assert grpcurl[-2:] == ["127.0.0.1:50051", "galley.v1.Generation/Generate"]
    assert ParseJson(request_of(grpcurl), pb.GenerateRequest()).text == "The ship's cook"
    (curl,) = (args for name, args in known.items() if name.startswith("curl"))
    assert json.loads(request_of(curl))["prompt"]
    for args in (grpcurl, curl):
        assert ("authorization: Bearer $KEY" in args) is ("auth" in values)
        assert ("client.crt" in args) is (values == WITH_ALL)
        assert ("ca.crt" in args) is (values == WITH_ALL)
    assert ("-plaintext" in grpcurl) is (values == {})
    name = "g.example.com" if values == WITH_PUBLIC else "proof-galley-gateway.galley.svc"
    url = f"https://{name}:8000" if values else "http://127.0.0.1:8000"
    assert f"{url}/v1/completions" in curl


def test_notes_name_a_test_that_is_there() -> None:
    assert "helm test" in commands({})
    assert "helm test" not in commands({"test": {"enabled": False}})


def test_notes_wait_for_the_progress_deadline() -> None:
    values = {"target": {"startupTimeoutSeconds": 3600}}
    patience = workloads(render(values))["gateway"]["spec"]["progressDeadlineSeconds"]
    assert f"--timeout {patience}s" in notes(values)


def test_notes_warn_of_keys_without_tls() -> None:
    warning = "Without tls.enabled, keys and tokens reach the gateway unencrypted"
    assert warning in notes({"auth": {"apiKeys": {"secretName": "keys"}}})
    assert warning not in notes(WITH_ALL)
    assert warning not in notes({})


def test_notes_warn_of_open_access_and_trial_store() -> None:
    assert "Every caller that reaches the gateway is admitted" in notes({})
    assert "trial server" in notes({})
    closed = notes(
        {**WITH_ALL, "redis": {"embedded": {"enabled": False}, "existingSecret": {"name": "store"}}}
    )
    assert "Every caller" not in closed
    assert "trial server" not in closed
    assert "auth.idSecret" in notes({"gateway": {"replicas": 2}})


@pytest.mark.parametrize(
    ("target", "is_said"),
    [
        ({}, True),
        ({"replicas": 2}, False),
        ({"kind": "deployment"}, True),
        ({"kind": "deployment", "maxSurge": 1}, False),
        ({"kind": "rayservice"}, False),
    ],
)
def test_notes_say_what_an_upgrade_of_one_replica_costs(target: Manifest, is_said: bool) -> None:
    assert ("There is one target replica" in notes({"target": target})) is is_said


def test_notes_follow_a_download() -> None:
    cache = {"persistence": {"enabled": True}, "download": {"enabled": True, "mode": "job"}}
    values = {"model": "example/big", "modelCache": cache}
    assert "app.kubernetes.io/component=download" in notes(values)
    assert "component=download" not in notes({})
