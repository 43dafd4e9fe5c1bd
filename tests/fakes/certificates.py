"""Generated certificates for tests, and files of them that are replaced as Kubernetes replaces Secrets."""

from __future__ import annotations

import datetime as dt
import ipaddress
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import NameOID

PrivateKey = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey

DAY = dt.timedelta(days=1)


@dataclass(frozen=True)
class Certificate:
    cert: Path
    key: Path


class Authority:
    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = _name_of(name)
        self._key = _new_key()
        certificate = self._signed(self._builder(self._name, self._key), authority=True)
        self.ca = self._write(f"{name}.ca", certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        name: str,
        *,
        since: dt.timedelta = -2 * DAY,
        until: dt.timedelta = DAY,
        usages: Sequence[x509.ObjectIdentifier] = (),
        key: PrivateKey | None = None,
        encryption: serialization.KeySerializationEncryption | None = None,
    ) -> Certificate:
        key = key or _new_key()
        builder = self._builder(_name_of(name), key, since=since, until=until)
        if usages:
            builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        certificate = self._signed(builder, authority=False)
        pem = serialization.Encoding.PEM
        encryption = encryption or serialization.NoEncryption()
        private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, encryption)
        return Certificate(
            self._write(f"{name}.cert", certificate.public_bytes(pem)), self._write(f"{name}.key", private)
        )

    def _builder(
        self,
        name: x509.Name,
        key: PrivateKey,
        *,
        since: dt.timedelta = -2 * DAY,
        until: dt.timedelta = DAY,
    ) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        [common] = name.get_attributes_for_oid(NameOID.COMMON_NAME)
        hosts = x509.SubjectAlternativeName(
            [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName(str(common.value))]
        )
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + since)
            .not_valid_after(now + until)
            .add_extension(hosts, critical=False)
        )

    def _signed(self, builder: x509.CertificateBuilder, *, authority: bool) -> x509.Certificate:
        constraints = x509.BasicConstraints(ca=authority, path_length=None)
        return builder.add_extension(constraints, critical=True).sign(self._key, hashes.SHA256())

    def _write(self, name: str, data: bytes) -> Path:
        path = self._directory / name
        path.write_bytes(data)
        return path


class Mounted:
    """Files in a directory that are replaced atomically, as kubelet replaces a mounted Secret."""

    def __init__(self, directory: Path, **files: Path | bytes) -> None:
        self._directory = directory
        self._versions = itertools.count()
        directory.mkdir()
        self.put(**files)
        for name in files:
            (directory / name).symlink_to(f"..data/{name}")

    def __getattr__(self, name: str) -> str:
        return str(self._directory / name)

    def put(self, **files: Path | bytes) -> None:
        version = self._directory / f"..{next(self._versions)}"
        version.mkdir()
        for name, content in files.items():
            (version / name).write_bytes(content if isinstance(content, bytes) else content.read_bytes())
        fresh = self._directory / "..fresh"
        fresh.symlink_to(version.name)
        fresh.rename(self._directory / "..data")

    def put_pair(self, ca: Path, pair: Certificate) -> None:
        self.put(ca=ca, cert=pair.cert, key=pair.key)


def mounted(directory: Path, ca: Path, pair: Certificate) -> Mounted:
    return Mounted(directory, ca=ca, cert=pair.cert, key=pair.key)


def caller_of(context: Any) -> str:
    [name, *_] = context.auth_context().get("x509_common_name", [b""])
    return str(name.decode())


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def _name_of(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
