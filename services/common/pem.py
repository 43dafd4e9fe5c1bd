"""What certificates and keys must be to be of use, said before they are used.

gRPC says of a bad file only that a port cannot be bound, or that handshakes fail. Imports `cryptography`: to
be imported where TLS is on.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes

    from services.common.files import NamedFile

_CURVES = (ec.SECP256R1, ec.SECP384R1)


def read_authorities(file: NamedFile) -> bytes:
    """The content of a bundle of authorities. Raises BadFile."""
    content = file.read()
    _certificates(file, content)
    return content


def read_pair(cert: NamedFile, key: NamedFile) -> tuple[bytes, bytes]:
    """The contents of a certificate with its chain, and of its key. Raises BadFile."""
    chain, private = cert.read(), key.read()
    own = _certificates(cert, chain)[0]
    if own.not_valid_after_utc <= datetime.now(UTC):
        raise cert.bad(f"the certificate has expired, at {own.not_valid_after_utc:%Y-%m-%d %H:%M:%S} UTC")
    _check_kind(cert, own.public_key())
    if _encoded(own.public_key()) != _encoded(_public_key(key, private)):
        raise key.bad("is not the key of the first certificate in the other file")
    return chain, private


def _certificates(file: NamedFile, content: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError:
        raise file.bad("holds no certificate in PEM, or a broken one") from None


def _public_key(file: NamedFile, content: bytes) -> PublicKeyTypes:
    """Of a private key. What is wrong is said in our own words: others' might show some of it."""
    try:
        return load_pem_private_key(content, password=None).public_key()
    except TypeError:
        raise file.bad("the key is encrypted; it must stand there without a password") from None
    except (ValueError, UnsupportedAlgorithm):
        raise file.bad("holds no private key in PEM, or a broken one") from None


def _check_kind(file: NamedFile, key: PublicKeyTypes) -> None:
    """Others are refused by gRPC's TLS in every handshake."""
    if isinstance(key, rsa.RSAPublicKey):
        return
    if not (isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, _CURVES)):
        raise file.bad("must be of an RSA key, or of an ECDSA key on P-256 or P-384")


def _encoded(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
