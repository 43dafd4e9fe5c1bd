"""What a gateway may be told, where one setting says what another may be."""

from __future__ import annotations

import pytest

from galley.common.config.settings import parse_settings
from services.draft.settings import DraftSettings
from services.gateway.settings import GatewaySettings, split_setting
from services.target.settings import TargetSettings

ISSUER = ("--jwt-issuer", "https://issuer.test", "--jwt-audience", "galley")


def parse(*argv: str) -> GatewaySettings:
    return parse_settings(GatewaySettings, argv, "test", "")


@pytest.mark.parametrize(
    ("argv", "reported"),
    [
        (("--jwt-audience", "galley"), "jwt_audience: must be empty without jwt_issuer"),
        (("--jwt-jwks-file", "keys.json"), "jwt_jwks_file: must be empty without jwt_issuer"),
        (("--jwt-issuer", "https://issuer.test"), "jwt_audience: required with jwt_issuer"),
        (
            ("--jwt-issuer", "https://issuer.test", "--jwt-audience", " , "),
            "jwt_audience: required with jwt_issuer",
        ),
        (
            ("--jwt-issuer", "issuer", "--jwt-audience", "galley"),
            "jwt_issuer: must be an https:// URL, unless jwt_jwks_file",
        ),
        (
            ("--jwt-issuer", "http://a.test", "--jwt-audience", "galley"),
            "jwt_issuer: must be an https:// URL",
        ),
        ((*ISSUER, "--jwt-jwks-url", "http://a.test/k"), "--jwt-jwks-url (or GALLEY_GATEWAY_JWT_JWKS_URL)"),
        ((*ISSUER, "--jwt-jwks-url", "https://u:p@a.test/k"), "must not contain a user name or password"),
        ((*ISSUER, "--jwt-jwks-url", "https:///k"), "must be an https:// URL"),
        (
            (*ISSUER, "--jwt-jwks-url", "https://a.test", "--jwt-jwks-file", "k"),
            "jwt_jwks_url: must be empty if jwt_jwks_file is set",
        ),
        ((*ISSUER, "--jwt-algorithms", "none"), "must be some of RS256"),
        ((*ISSUER, "--jwt-algorithms", "RS256,HS256"), "got 'HS256'"),
        ((*ISSUER, "--jwt-algorithms", ","), "got none"),
    ],
)
def test_incomplete_jwt_settings_are_refused(
    argv: tuple[str, ...], reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(*argv)
    assert ended.value.code == 2
    assert reported in capsys.readouterr().err


@pytest.mark.parametrize("url", ["https://u:secret@a\N{ACCOUNT OF}b.test", "https://u:[secret]@a.test"])
def test_a_malformed_jwks_url_is_reported_without_its_password(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(*ISSUER, "--jwt-jwks-url", url)
    reported = capsys.readouterr().err
    assert "--jwt-jwks-url (or GALLEY_GATEWAY_JWT_JWKS_URL): must " in reported
    assert "secret" not in reported


def test_an_issuer_with_given_keys_may_have_any_name() -> None:
    argv = ("--jwt-issuer", "kubernetes/serviceaccount", "--jwt-audience", "galley")
    assert parse(*argv, "--jwt-jwks-file", "keys.json").jwt_issuer == "kubernetes/serviceaccount"
    assert parse(*argv, "--jwt-jwks-url", "https://a.test/keys").jwt_algorithms == "RS256,ES256"


@pytest.mark.parametrize("split", ["v2", "v2=", "=0.1", "v2=x", "v2=0", "v2=0.6", "v2=nan", "v 2=0.1"])
def test_a_split_that_cannot_be_is_refused(split: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--draft-split", split)
    assert f"must be VERSION=SHARE, at most 0.5, got {split!r}" in capsys.readouterr().err


def test_a_split_is_a_version_and_its_share() -> None:
    assert split_setting(parse("--draft-split", "v2=0.05").draft_split) == ("v2", 0.05)
    assert parse().draft_split == ""


def test_connections_have_a_maximum_age() -> None:
    reported = parse()
    limits = reported.server_limits()
    assert (limits.max_connection_age_s, limits.max_connection_idle_s) == (600.0, 900.0)


def test_replicas_do_not_count_the_fields_of_messages() -> None:
    """A gateway joins the requests of many sessions, each with 1,024 biases, to one message."""
    assert parse().server_limits().max_message_fields == 1 << 14
    for settings in (TargetSettings(), DraftSettings()):
        assert settings.server_limits().max_message_fields == 0


def test_every_setting_has_a_long_flag() -> None:
    assert parse("--k", "3").k == 3
