"""Certificates for servers of tests, made on the spot."""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

if TYPE_CHECKING:
    from pathlib import Path

_DAY = dt.timedelta(days=1)


@dataclass(frozen=True)
class Certificate:
    """Paths of PEM files."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates; `ca` is its own."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = _name_of(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._build(self._name, self._key, authority=True)
        self.ca = self._write(f"{name}.ca", certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str) -> Certificate:
        """For whoever serves at 127.0.0.1, or calls from anywhere."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._build(_name_of(name), key, authority=False)
        pem = serialization.Encoding.PEM
        private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        return Certificate(
            self._write(f"{name}.cert", certificate.public_bytes(pem)), self._write(f"{name}.key", private)
        )

    def _build(
        self, name: x509.Name, key: ec.EllipticCurvePrivateKey, *, authority: bool
    ) -> x509.Certificate:
        now = dt.datetime.now(dt.UTC)
        host = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _DAY)
            .not_valid_after(now + _DAY)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(host, critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def _write(self, name: str, data: bytes) -> Path:
        path = self._directory / name
        path.write_bytes(data)
        return path


def _name_of(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
