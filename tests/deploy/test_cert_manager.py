"""Certificates that the chart asks cert-manager for."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.deploy import schemas
from tests.deploy.matrix import laid_over
from tests.deploy.render import (
    ROOT,
    Manifest,
    env_of,
    of_kind,
    only_container,
    pods,
    render,
    render_refused,
)

ISSUED = {"tls": {"enabled": True, "certManager": {"enabled": True}}}
PUBLIC = {
    "tls": {
        "certManager": {"publicIssuerRef": {"name": "letsencrypt"}},
        "gateway": {"name": "g.example.com", "dnsNames": ["h.example.com"]},
    }
}
OWN = {"name": "galley-ca", "kind": "Issuer", "group": "cert-manager.io"}


def rendered(*values: Manifest) -> list[Manifest]:
    manifests = render(laid_over([ISSUED, *values]))
    for manifest in manifests:
        schemas.check(manifest)
    return manifests


def certificates(manifests: list[Manifest]) -> dict[str, Manifest]:
    return {each["spec"]["secretName"]: each["spec"] for each in of_kind(manifests, "Certificate").values()}


def mounted(manifests: list[Manifest]) -> set[str]:
    return {
        volume["secret"]["secretName"]
        for spec in pods(manifests).values()
        for volume in spec.get("volumes", [])
        if "secret" in volume
    }


@pytest.mark.parametrize(
    "more",
    [{}, PUBLIC, {"tls": {"mutual": False}}, {"drafts": [{"name": "a"}, {"name": "b"}]}],
    ids=["own authority", "public", "servers alone", "pools"],
)
def test_every_mounted_secret_is_made(more: Manifest) -> None:
    manifests = rendered(more)
    assert mounted(manifests) == certificates(manifests).keys() - {"galley-ca"}


def test_the_chart_makes_an_authority_of_its_own() -> None:
    manifests = rendered()
    issuers = of_kind(manifests, "Issuer")
    assert issuers["galley-ca"]["spec"] == {"ca": {"secretName": "galley-ca"}}
    made = certificates(manifests)
    authority = made.pop("galley-ca")
    assert authority["isCA"] is True
    assert authority["issuerRef"]["name"] == "galley-selfsigned"
    assert issuers["galley-selfsigned"]["spec"] == {"selfSigned": {}}
    assert authority["privateKey"]["rotationPolicy"] == "Never", "else its renewal would break trust"
    assert all(spec["issuerRef"] == OWN for spec in made.values())


def test_an_issuer_of_yours_signs_all() -> None:
    issuer = {"name": "corporate", "kind": "ClusterIssuer"}
    manifests = rendered({"tls": {"certManager": {"issuerRef": issuer}}})
    assert not of_kind(manifests, "Issuer")
    for spec in certificates(manifests).values():
        assert spec["issuerRef"] == {**issuer, "group": "cert-manager.io"}
    gateway = certificates(manifests)["galley-gateway-tls"]
    assert gateway["dnsNames"] == ["galley-gateway.galley.svc"], "it may not sign others"


@pytest.mark.parametrize("role", ["target", "draft"])
def test_replicas_can_serve_and_not_call(role: str) -> None:
    manifests = rendered()
    spec = certificates(manifests)[f"galley-{role}-tls"]
    assert "server auth" in spec["usages"]
    assert "client auth" not in spec["usages"]
    expected = env_of(only_container(pods(manifests)["gateway"]))[f"GALLEY_GATEWAY_{role.upper()}_TLS_NAME"]
    assert expected in spec["dnsNames"]


def test_the_gateway_serves_and_calls() -> None:
    spec = certificates(rendered())["galley-gateway-tls"]
    assert {"server auth", "client auth"} <= set(spec["usages"])
    assert {"galley-gateway", "galley-gateway-headless", "galley-gateway.galley.svc"} <= {*spec["dnsNames"]}
    alone = certificates(rendered({"tls": {"mutual": False}}))["galley-gateway-tls"]
    assert "client auth" not in alone["usages"]


def test_a_public_authority_signs_what_callers_see_alone() -> None:
    manifests = rendered(PUBLIC)
    made = certificates(manifests)
    served, peer = made["galley-gateway-tls"], made["galley-gateway-peer-tls"]
    assert served["issuerRef"]["name"] == "letsencrypt"
    assert served["dnsNames"] == ["g.example.com", "h.example.com"]
    assert "client auth" not in served["usages"]
    assert peer["issuerRef"] == OWN
    assert peer["usages"] == ["digital signature", "client auth"]
    test = env_of(only_container(pods(manifests)["test"]))
    assert test["GALLEY_TLS"] == "true", "its Secret has no ca.crt"
    assert test["GALLEY_TLS_SERVER_NAME"] == "g.example.com"


def test_blocks_of_the_page_render() -> None:
    page = (ROOT / "docs" / "operate" / "tls.md").read_text()
    blocks = re.findall(r"```yaml\n(tls:\n.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        made = certificates(rendered(yaml.safe_load(block)))
        assert "galley.example.com" in made["galley-gateway-tls"]["dnsNames"]


def test_without_drafts_they_need_no_certificate() -> None:
    assert "galley-draft-tls" not in certificates(rendered({"draft": {"enabled": False}}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tls": {"enabled": False}}, "tls.certManager.enabled: must be false"),
        ({"tls": {"certManager": {"publicIssuerRef": {"name": "p"}}}}, "tls.gateway.name: must be set"),
        (
            {"tls": {"enabled": False, "certManager": {"enabled": False}, "gateway": {"dnsNames": ["g"]}}},
            "tls.gateway.dnsNames: must be empty",
        ),
        ({"tls": {"certManager": {"duration": "90d"}}}, "/tls/certManager/duration"),
        (
            {"tls": {"certManager": {"duration": "720h", "renewBefore": "720h"}}},
            "tls.certManager.renewBefore: must be less than tls.certManager.duration (720h), got 720h",
        ),
    ],
)
def test_certificates_that_cannot_be_are_refused(values: Manifest, message: str) -> None:
    assert message in " ".join(render_refused(laid_over([ISSUED, values])).split())
