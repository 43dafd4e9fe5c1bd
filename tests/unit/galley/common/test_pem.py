"""Certificates and keys of no use are refused, with the setting and the reason, and without their content."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID

from galley.common.tls.channels import Material
from galley.common.tls.credentials import TlsFiles
from galley.common.tls.files import BadFile, NamedFile
from tests.fakes.certificates import Authority, Certificate

CLIENT, SERVER = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH
ANY = ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "authority")


def files(ca: Path | str, pair: Certificate | None, *, serves: bool = False) -> TlsFiles:
    return TlsFiles(
        NamedFile("ca_file", str(ca)),
        NamedFile("cert_file", str(pair.cert) if pair else ""),
        NamedFile("key_file", str(pair.key) if pair else ""),
        serves,
    )


def test_given_options_are_read(authority: Authority) -> None:
    pair = authority.issue("one")
    assert files("", None).read() == Material()
    assert files(authority.ca, None).read() == Material(authority.ca.read_bytes())
    whole = files(authority.ca, pair).read()
    contents = (authority.ca.read_bytes(), pair.cert.read_bytes(), pair.key.read_bytes())
    assert (whole.ca, whole.cert, whole.key) == contents
    assert "PRIVATE" not in repr(whole)


def test_it_is_known_when_a_certificate_ends(authority: Authority) -> None:
    reported = files("", authority.issue("one", until=dt.timedelta(hours=3))).read().expires
    assert reported is not None
    assert abs(reported - dt.datetime.now(dt.UTC) - dt.timedelta(hours=3)) < dt.timedelta(minutes=1)


@pytest.mark.parametrize("usages", [(CLIENT,), (CLIENT, SERVER), (ANY,), ()])
def test_a_certificate_may_be_for_more_than_it_is_used_for(
    authority: Authority, usages: tuple[x509.ObjectIdentifier, ...]
) -> None:
    pair = authority.issue("one", usages=usages)
    assert files("", pair).read().cert == pair.cert.read_bytes()


def _expired(authority: Authority) -> TlsFiles:
    return files("", authority.issue("x", until=-dt.timedelta(seconds=1)))


def _too_early(authority: Authority) -> TlsFiles:
    return files("", authority.issue("x", since=dt.timedelta(hours=1)))


def _for_servers(authority: Authority) -> TlsFiles:
    return files("", authority.issue("x", usages=(SERVER,)))


def _for_clients(authority: Authority) -> TlsFiles:
    return files("", authority.issue("x", usages=(CLIENT, x509.ObjectIdentifier("1.2.3"))), serves=True)


def _of_another(authority: Authority) -> TlsFiles:
    return files("", Certificate(authority.issue("one").cert, authority.issue("two").key))


def _encrypted(authority: Authority) -> TlsFiles:
    return files("", authority.issue("x", encryption=serialization.BestAvailableEncryption(b"secret")))


def _edwards(authority: Authority) -> TlsFiles:
    return files("", authority.issue("x", key=ed25519.Ed25519PrivateKey.generate()))


def _curve(authority: Authority) -> TlsFiles:
    return files("", authority.issue("x", key=ec.generate_private_key(ec.SECP521R1())))


def _swapped(authority: Authority) -> TlsFiles:
    pair = authority.issue("x")
    return files("", Certificate(pair.key, pair.cert))


def _broken_key(authority: Authority) -> TlsFiles:
    pair = authority.issue("x")
    pair.key.write_text("-----BEGIN PRIVATE KEY-----\nsecret\n-----END PRIVATE KEY-----\n")
    return files("", pair)


def _empty_ca(authority: Authority) -> TlsFiles:
    authority.ca.write_text("\n")
    return files(authority.ca, None)


def _broken_ca(authority: Authority) -> TlsFiles:
    authority.ca.write_text("-----BEGIN CERTIFICATE-----\nsecret\n-----END CERTIFICATE-----\n")
    return files(authority.ca, None)


def _half(authority: Authority) -> TlsFiles:
    whole = files("", authority.issue("x"))
    return TlsFiles(whole.ca, whole.cert, NamedFile("key_file", ""))


@pytest.mark.parametrize(
    ("make", "setting", "why"),
    [
        (_expired, "cert_file", "has expired, at 20"),
        (_too_early, "cert_file", "is not valid before 20"),
        (_for_servers, "cert_file", "the extended key usage of the certificate must include clientAuth"),
        (_for_clients, "cert_file", "the extended key usage of the certificate must include serverAuth"),
        (_of_another, "key_file", "must be the private key of the first certificate in "),
        (_encrypted, "key_file", "must hold a key without a password"),
        (_edwards, "cert_file", "an RSA key, or of an ECDSA key on P-256 or P-384"),
        (_curve, "cert_file", "an RSA key, or of an ECDSA key on P-256 or P-384"),
        (_swapped, "cert_file", "must hold certificates"),
        (_broken_key, "key_file", "must hold a private key"),
        (_empty_ca, "ca_file", "must hold certificates"),
        (_broken_ca, "ca_file", "must hold certificates"),
        (_half, "key_file", "required with cert_file"),
    ],
)
def test_unusable_files_are_refused_with_their_setting(
    authority: Authority, make: Callable[[Authority], TlsFiles], setting: str, why: str
) -> None:
    with pytest.raises(BadFile) as refused:
        make(authority).read()
    assert refused.value.setting == setting
    assert why in refused.value.problem
    assert "secret" not in str(refused.value)
