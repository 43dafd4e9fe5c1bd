"""Fetching an issuer's keys over https: where they are, and what is not taken for an answer."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from galley.common.tls.files import BadFile
from services.gateway.auth.jwks import JwksClient
from tests.fakes.certificates import Authority
from tests.fakes.issuers import CONFIGURATION, IssuerServer, TokenIssuer, issuer_server, jwks

KEYS = "/keys?of=1"
EC = TokenIssuer()
LARGE = 1 << 20


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[IssuerServer]:
    async with issuer_server(tmp_path) as serving:
        serving.publish(KEYS, jwks(EC))
        yield serving


def configure(server: IssuerServer, **more: object) -> None:
    fields = {"issuer": server.url, "jwks_uri": server.url + KEYS, **more}
    server.publish(CONFIGURATION, json.dumps(fields).encode())


def authorities(server: IssuerServer) -> bytes:
    return Path(server.ca_file).read_bytes()


async def ids(issuer: JwksClient) -> list[str | None]:
    return [key.key_id for key in (await issuer.fetch()).keys]


async def test_keys_are_fetched_where_the_settings_say(server: IssuerServer) -> None:
    assert await ids(JwksClient("anybody", server.url + KEYS, server.ca_file)) == ["one"]
    assert server.requests == [KEYS]


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff", b"no certificate"])
def test_file_without_authorities_does_not_mean_those_of_the_system(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ca.pem"
    path.write_bytes(content)
    with pytest.raises(BadFile, match="must hold certificates in PEM"):
        JwksClient("https://issuer.test", "", str(path))


async def test_comments_between_authorities_may_be_of_any_characters(
    server: IssuerServer, tmp_path: Path
) -> None:
    path = tmp_path / "ca.pem"
    path.write_bytes("# Autorité\n".encode() + authorities(server))
    assert await ids(JwksClient("anybody", server.url + KEYS, str(path))) == ["one"]


async def test_authorities_may_be_replaced_and_stay_in_use_while_new_ones_are_unusable(
    server: IssuerServer, tmp_path: Path
) -> None:
    path = tmp_path / "ca.pem"
    path.write_bytes(Authority(tmp_path, "another").ca.read_bytes())
    client = JwksClient("anybody", server.url + KEYS, str(path))
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        await client.fetch()
    path.write_bytes(authorities(server))
    assert await ids(client) == ["one"]
    path.unlink()
    os.mkfifo(path)
    assert await ids(client) == ["one"]


async def test_keys_are_fetched_where_the_issuers_configuration_says(server: IssuerServer) -> None:
    configure(server)
    assert await ids(JwksClient(server.url, "", server.ca_file)) == ["one"]
    assert server.requests == [CONFIGURATION, KEYS]


async def test_a_slash_at_the_end_belongs_to_the_name(server: IssuerServer) -> None:
    configure(server, issuer=server.url + "/")
    assert await ids(JwksClient(server.url + "/", "", server.ca_file)) == ["one"]
    with pytest.raises(ValueError, match="issuer: must be https:"):
        await ids(JwksClient(server.url, "", server.ca_file))


@pytest.mark.parametrize(
    ("reported", "problem"),
    [
        ({"issuer": "https://other.test"}, "issuer: must be https:"),
        ({"issuer": None}, "issuer: must be https:"),
        ({"jwks_uri": None}, "jwks_uri: must be an https:// URL"),
        ({"jwks_uri": ""}, "jwks_uri: must be an https:// URL"),
        ({"jwks_uri": 7}, "jwks_uri: must be an https:// URL"),
        ({"jwks_uri": "http://127.0.0.1/keys"}, "jwks_uri: must be an https:// URL"),
        ({"jwks_uri": "file:///etc/passwd"}, "jwks_uri: must be an https:// URL"),
        ({"jwks_uri": "https://user:hunter2@127.0.0.1/keys"}, "jwks_uri: must not contain"),
    ],
)
async def test_a_bad_configuration_is_refused(
    server: IssuerServer, reported: dict[str, object], problem: str
) -> None:
    configure(server, **reported)
    with pytest.raises(ValueError, match=problem) as caught:
        await JwksClient(server.url, "", server.ca_file).fetch()
    assert CONFIGURATION in str(caught.value)
    assert "hunter2" not in str(caught.value)


async def test_invalid_responses_are_refused(server: IssuerServer) -> None:
    other = server.url + "/other"
    packed = "Content-Encoding: gzip\r\n"
    answers: list[tuple[bytes, str, str, str]] = [
        (b"", "500 Oops", "", "HTTP 500"),
        (b"", "302 Found", f"Location: {server.url}{KEYS}\r\n", "HTTP 302"),
        (b"", "200 OK", packed, "is compressed"),
        (b"<html>", "200 OK", "", "must be a JSON object"),
        (b" " * LARGE + jwks(EC), "200 OK", "", "must be at most 262144 bytes"),
    ]
    for body, status, headers, problem in answers:
        server.publish("/other", body, status, headers)
        with pytest.raises((OSError, ValueError), match=problem):
            await JwksClient("anybody", other, server.ca_file).fetch()
    server.answers["/other"] = b"SSH-2.0-OpenSSH\r\n"
    with pytest.raises(OSError, match="/other: "):
        await JwksClient("anybody", other, server.ca_file).fetch()
    assert server.requests == ["/other"] * 6, "no redirect was followed"


async def test_an_endless_response_is_cut_off(server: IssuerServer) -> None:
    server.answers["/endless"] = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"ffff\r\n".join(
        [b"", *[b" " * 0xFFFF + b"\r\n"] * 64]
    )
    with pytest.raises(ValueError, match="must be at most 262144 bytes"):
        await JwksClient("anybody", server.url + "/endless", server.ca_file).fetch()
    server.answers["/silent"] = None
    slow = JwksClient("anybody", server.url + "/silent", server.ca_file, timeout_s=1.0)
    async with asyncio.timeout(5):
        with pytest.raises(OSError, match=r"/silent: no complete response within 1 s"):
            await slow.fetch()
    assert server.hanging.is_set()


async def test_the_issuers_certificate_is_verified(server: IssuerServer, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other", "others")
    for ca_file in ("", str(other.ca)):
        with pytest.raises(OSError, match=r"[Cc]ertificate"):
            await JwksClient("anybody", server.url + KEYS, ca_file).fetch()
    by_name = server.url.replace("127.0.0.1", "localhost")
    with pytest.raises(OSError, match=r"[Cc]ertificate"):
        await JwksClient("anybody", by_name + KEYS, server.ca_file).fetch()
    assert server.requests == []


async def test_an_unreachable_issuer(server: IssuerServer) -> None:
    with pytest.raises(OSError, match=r"127\.0\.0\.1"):
        await JwksClient("anybody", "https://127.0.0.1:1/keys", server.ca_file).fetch()


def test_unreadable_authorities_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"jwt_ca_file: .*none\.pem: No such file"):
        JwksClient("anybody", "", str(tmp_path / "none.pem"))
    (tmp_path / "empty.pem").write_text("nothing")
    with pytest.raises(BadFile, match=r"jwt_ca_file: .*empty\.pem"):
        JwksClient("anybody", "", str(tmp_path / "empty.pem"))
