"""Check certificates and keys before they are used.

gRPC reports a bad file only as a port that cannot be bound or as failed handshakes. Imports `cryptography`,
so import this only if TLS is on.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from galley.common.tls.files import NamedFile

_CURVES = (ec.SECP256R1, ec.SECP384R1)
_TIME = "%Y-%m-%d %H:%M:%S UTC"


class Pair(NamedTuple):
    """The contents of a certificate with its chain, and of its key; the certificate ends at `expires`."""

    chain: bytes
    key: bytes
    expires: datetime


def read_authorities(file: NamedFile) -> bytes:
    """Return the content of a bundle of authorities. Raise BadFile if it is unusable."""
    content = file.read()
    _certificates(file, content)
    return content


def read_pair(cert: NamedFile, key: NamedFile, *, serves: bool) -> Pair:
    """Return a pair that is valid now for a server (`serves`) or a client. Raise BadFile."""
    chain, private = cert.read(), key.read()
    own = _certificates(cert, chain)[0]
    _check_time(cert, own, datetime.now(UTC))
    _check_purpose(cert, own, serves=serves)
    public = _public_key_of(cert, own)
    if _encoded(public) != _encoded(_public_key(key, private)):
        raise key.bad(f"must be the private key of the first certificate in {cert.path} ({cert.setting})")
    return Pair(chain, private, own.not_valid_after_utc)


def _certificates(file: NamedFile, content: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError:
        raise file.bad("must hold certificates in PEM, got none or a broken one") from None


def _check_time(file: NamedFile, own: x509.Certificate, now: datetime) -> None:
    if own.not_valid_after_utc <= now:
        raise file.bad(f"the certificate has expired, at {own.not_valid_after_utc:{_TIME}}")
    if own.not_valid_before_utc > now:
        raise file.bad(
            f"the certificate is not valid before {own.not_valid_before_utc:{_TIME}}", may_pass=True
        )


def _check_purpose(file: NamedFile, own: x509.Certificate, *, serves: bool) -> None:
    """Raise BadFile if the certificate names usages, and not the needed one: peers would refuse it."""
    needed, name = (
        (ExtendedKeyUsageOID.SERVER_AUTH, "serverAuth")
        if serves
        else (ExtendedKeyUsageOID.CLIENT_AUTH, "clientAuth")
    )
    try:
        usages = own.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, ValueError):
        return  # names none, or has extensions that cannot be read here: gRPC judges by itself
    if needed not in usages and ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE not in usages:
        raise file.bad(f"the extended key usage of the certificate must include {name}")


def _public_key_of(file: NamedFile, own: x509.Certificate) -> PublicKeyTypes:
    """Return the key of a certificate, if it is of a kind that gRPC accepts in handshakes."""
    try:
        key = own.public_key()
    except (ValueError, UnsupportedAlgorithm):
        key = None
    fits = isinstance(key, rsa.RSAPublicKey) or (
        isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, _CURVES)
    )
    if key is None or not fits:
        raise file.bad("must be of an RSA key, or of an ECDSA key on P-256 or P-384")
    return key


def _public_key(file: NamedFile, content: bytes) -> PublicKeyTypes:
    """Return the public part of a private key; errors are our own, as others might show the key."""
    try:
        return load_pem_private_key(content, password=None).public_key()
    except TypeError:
        raise file.bad("must hold a key without a password, got an encrypted one") from None
    except (ValueError, UnsupportedAlgorithm):
        raise file.bad("must hold a private key in PEM, got none or a broken one") from None


def _encoded(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
