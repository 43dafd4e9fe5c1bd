"""TLS, callers and the way in: files that are mounted, and the variables that name them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.deploy.matrix import FROM_EDGE, JWT, TLS, laid_over
from tests.deploy.render import ROLES, Manifest, env_of, of_kind, only_container, pods, render, services


def mounted(spec: Manifest) -> dict[str, str]:
    """Return mounted Secrets and ConfigMaps by path below /etc/galley."""
    sources = {
        volume["name"]: volume.get("secret", {}).get("secretName") or volume.get("configMap", {}).get("name")
        for volume in spec["volumes"]
    }
    result = {mount["mountPath"]: sources[mount["name"]] for mount in only_container(spec)["volumeMounts"]}
    return {path: name for path, name in result.items() if path.startswith("/etc/galley/")}


def files(spec: Manifest) -> dict[str, str]:
    given = env_of(only_container(spec))
    return {name: value for name, value in given.items() if value.startswith("/etc/galley/")}


def check_mounted_variables(spec: Manifest) -> None:
    folders = {value.rpartition("/")[0] for value in files(spec).values()}
    assert folders == set(mounted(spec))


@pytest.mark.parametrize(
    "values",
    [
        {"tls": TLS},
        {"tls": {**TLS, "mutual": False}},
        {
            "tls": {**TLS, "gateway": {"secretName": "g", "clientCaSecretName": "c", "peerSecretName": "p"}},
            "test": {"enabled": False},
        },
        {"auth": {"apiKeys": {"secretName": "keys"}, "jwt": {**JWT, "jwksConfigMap": {"name": "jwks"}}}},
        {"otel": {"endpoint": "https://collector:4317", "caSecretName": "ca"}},
    ],
    ids=["mutual", "servers alone", "callers too", "keys and tokens", "collector"],
)
def test_variables_name_exactly_the_mounted_files(values: Manifest) -> None:
    for role, spec in pods(render(values)).items():
        if role in ROLES:
            check_mounted_variables(spec)


def test_without_tls_nothing_of_it_is_there() -> None:
    for role, spec in pods(render()).items():
        if role in ROLES:
            assert not mounted(spec)
            assert not [name for name in env_of(only_container(spec)) if "TLS" in name or "PEER" in name]


def test_every_server_serves_its_own_certificate() -> None:
    rendered = pods(render({"tls": TLS}))
    for role in ROLES:
        prefix = f"GALLEY_{role.upper()}_TLS_"
        assert mounted(rendered[role])["/etc/galley/tls"] == f"{role}-tls"
        actual = files(rendered[role])
        assert actual[f"{prefix}CERT_FILE"] == "/etc/galley/tls/tls.crt"
        assert actual[f"{prefix}KEY_FILE"] == "/etc/galley/tls/tls.key"


@pytest.mark.parametrize("mutual", [True, False])
def test_mutual_tls_needs_client_certificates(mutual: bool) -> None:
    rendered = pods(render({"tls": {**TLS, "mutual": mutual}}))
    gateway = files(rendered["gateway"])
    assert gateway["GALLEY_GATEWAY_PEER_CA_FILE"] == "/etc/galley/peer-tls/ca.crt"
    assert ("GALLEY_GATEWAY_PEER_CERT_FILE" in gateway) is mutual
    assert ("GALLEY_GATEWAY_PEER_KEY_FILE" in gateway) is mutual
    for role in ("draft", "target"):
        assert (f"GALLEY_{role.upper()}_TLS_CLIENT_CA_FILE" in files(rendered[role])) is mutual
    assert "GALLEY_GATEWAY_TLS_CLIENT_CA_FILE" not in gateway, "that is for callers"


def test_expected_certificate_names() -> None:
    own = laid_over([{"tls": TLS}, {"tls": {"draft": {"name": "drafts.example.com"}}}])
    actual = env_of(only_container(pods(render(own))["gateway"]))
    assert actual["GALLEY_GATEWAY_TARGET_TLS_NAME"] == "galley-target.galley.svc"
    assert actual["GALLEY_GATEWAY_DRAFT_TLS_NAME"] == "drafts.example.com"


def test_separate_peer_certificate() -> None:
    shared = pods(render({"tls": TLS}))["gateway"]
    assert mounted(shared)["/etc/galley/peer-tls"] == "gateway-tls"
    values = laid_over([{"tls": TLS}, {"tls": {"gateway": {"peerSecretName": "inside"}}}])
    assert mounted(pods(render(values))["gateway"])["/etc/galley/peer-tls"] == "inside"


def test_secrets_are_for_the_group_of_the_containers_alone() -> None:
    for name, spec in pods(render({"tls": TLS, "auth": {"apiKeys": {"secretName": "keys"}}})).items():
        for volume in spec.get("volumes", []):
            if "secret" in volume:
                assert volume["secret"]["defaultMode"] == 0o440, name


def test_api_keys_file_is_mounted() -> None:
    rendered = pods(render({"auth": {"apiKeys": {"secretName": "callers", "key": "k.toml"}}}))
    gateway = rendered["gateway"]
    assert mounted(gateway) == {"/etc/galley/api-keys": "callers"}
    assert files(gateway) == {"GALLEY_GATEWAY_API_KEYS_FILE": "/etc/galley/api-keys/k.toml"}
    assert not mounted(rendered["target"])


@pytest.mark.parametrize(
    ("jwt", "expected"),
    [
        ({}, {}),
        ({"jwksUrl": "https://issuer/keys"}, {"GALLEY_GATEWAY_JWT_JWKS_URL": "https://issuer/keys"}),
        (
            {"jwksConfigMap": {"name": "jwks"}},
            {"GALLEY_GATEWAY_JWT_JWKS_FILE": "/etc/galley/jwks/jwks.json"},
        ),
        ({"caSecretName": "ca"}, {"GALLEY_GATEWAY_JWT_CA_FILE": "/etc/galley/jwt-ca/ca.crt"}),
    ],
    ids=["discovery", "url", "file", "own authority"],
)
def test_jwt_settings(jwt: Manifest, expected: Mapping[str, str]) -> None:
    gateway = env_of(only_container(pods(render({"auth": {"jwt": {**JWT, **jwt}}}))["gateway"]))
    assert {name: value for name, value in gateway.items() if "JWT_" in name} == {
        "GALLEY_GATEWAY_JWT_ISSUER": JWT["issuer"],
        "GALLEY_GATEWAY_JWT_AUDIENCE": JWT["audience"],
        "GALLEY_GATEWAY_JWT_ALGORITHMS": "RS256,ES256",
        "GALLEY_GATEWAY_JWT_PRINCIPAL_CLAIM": "sub",
        **expected,
    }


def test_helm_test_uses_key_and_certificate() -> None:
    values = laid_over(
        [
            {"tls": TLS, "auth": {"apiKeys": {"secretName": "keys"}}},
            {"tls": {"gateway": {"clientCaSecretName": "callers"}}},
            {"test": {"apiKey": {"secretName": "mine"}, "clientCertSecretName": "my-cert"}},
        ]
    )
    rendered = render(values)
    (test,) = of_kind(rendered, "Pod").values()
    assert test["metadata"]["annotations"] == {
        "helm.sh/hook": "test",
        "helm.sh/hook-delete-policy": "before-hook-creation",
    }, "its log stays"
    container = only_container(test["spec"])
    gateway = only_container(pods(rendered)["gateway"])
    assert container["image"] == gateway["image"], "one that is there"
    assert container["command"] == ["python", "-m", "galley.cli"]
    assert container["args"][0] == "generate"
    actual = env_of(container)
    assert actual["GALLEY_TLS_SERVER_NAME"] == "galley-gateway.galley.svc"
    check_mounted_variables(test["spec"])
    (key,) = (entry for entry in container["env"] if entry["name"] == "GALLEY_API_KEY")
    assert key["valueFrom"]["secretKeyRef"] == {"name": "mine", "key": "api-key"}
    volumes = {volume["name"]: volume for volume in test["spec"]["volumes"]}
    assert volumes["tls"]["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}], "not the gateway's key"


def test_helm_test_trusts_public_authorities() -> None:
    """Secrets of ACME issuers hold no ca.crt."""
    public = {"publicAuthority": True, "name": "g.example.com", "peerSecretName": "peer"}
    test = pods(render(laid_over([{"tls": TLS}, {"tls": {"gateway": public}}])))["test"]
    assert not mounted(test)
    actual = env_of(only_container(test))
    assert actual["GALLEY_TLS"] == "true"
    assert actual["GALLEY_TLS_SERVER_NAME"] == "g.example.com"
    assert not files(test)


@pytest.mark.parametrize("auth", [{"apiKeys": {"secretName": "keys"}}, {"jwt": JWT}], ids=["keys", "tokens"])
def test_helm_test_without_a_key_checks_health(auth: Manifest) -> None:
    container = only_container(pods(render({"tls": TLS, "auth": auth}))["test"])
    assert container["command"] == ["python", "-m", "galley.common.server.healthcheck"]
    assert container["args"] == ["galley-gateway:50051"]
    assert env_of(container)["GALLEY_TLS_CA_FILE"] == "/etc/galley/tls/ca.crt"


def test_helm_test_can_be_switched_off() -> None:
    rendered = render({"test": {"enabled": False}, "networkPolicy": FROM_EDGE})
    assert not of_kind(rendered, "Pod")
    assert not [name for name in of_kind(rendered, "NetworkPolicy") if "test" in name]


@pytest.mark.parametrize(("tls", "protocol"), [({}, "kubernetes.io/h2c"), (TLS, "https")])
def test_app_protocol(tls: Manifest, protocol: str) -> None:
    service = services(render({"tls": tls}))["galley-gateway"]
    assert service["spec"]["ports"][0]["appProtocol"] == protocol


@pytest.mark.parametrize(("kind", "policy"), [("LoadBalancer", "Local"), ("ClusterIP", None)])
def test_external_traffic_policy(kind: str, policy: str | None) -> None:
    values = {
        "gateway": {"service": {"type": kind, "externalTrafficPolicy": "Local"}},
        "networkPolicy": FROM_EDGE,
    }
    spec = services(render(values))["galley-gateway"]["spec"]
    assert (spec["type"], spec.get("externalTrafficPolicy")) == (kind, policy)
