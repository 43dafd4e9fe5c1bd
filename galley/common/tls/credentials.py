"""Make gRPC credentials from PEM files that may be replaced while they are used (docs/operate/tls.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import grpc

from galley.common.tls.channels import Material
from galley.common.tls.files import BadFile, NamedFile, WatchedFiles


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files of authorities, certificate and key; an empty path is no file. `serves`: for a server."""

    ca: NamedFile
    cert: NamedFile
    key: NamedFile
    serves: bool = False

    def read(self) -> Material:
        from galley.common.tls import pem  # noqa: PLC0415  # imports cryptography, needed with TLS only

        for file, other in ((self.cert, self.key), (self.key, self.cert)):
            if other.path and not file.path:
                raise BadFile(file.setting, f"required with {other.setting}")
        ca = pem.read_authorities(self.ca) if self.ca.path else None
        if not self.cert.path:
            return Material(ca)
        return Material(ca, *pem.read_pair(self.cert, self.key, serves=self.serves))

    @property
    def named(self) -> list[NamedFile]:
        return [file for file in (self.ca, self.cert, self.key) if file.path]

    def watch(self, check_interval_s: float = 0.0) -> WatchedFiles[Material]:
        return WatchedFiles(self.named, self.read, check_interval_s=check_interval_s)


def server_credentials(
    files: WatchedFiles[Material] | None,
) -> Callable[[], grpc.ServerCredentials | None]:
    """Return a function that makes credentials for one server, or returns None without files.

    They check the files for changes before each handshake. Client certificates are required if the files
    include authorities.
    """
    if files is None:
        return lambda: None
    return partial(_watching, files, files.latest())


def _watching(files: WatchedFiles[Material], used: Material) -> grpc.ServerCredentials:
    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        if (current := files.current()) is used:
            return None
        used = current
        return _configuration(current)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(used),
        fetch,  # type: ignore[arg-type]  # may return None, as gRPC documents
        require_client_authentication=used.ca is not None,
    )


def _configuration(material: Material) -> grpc.ServerCertificateConfiguration:
    pair = (material.key or b"", material.cert or b"")
    return grpc.ssl_server_certificate_configuration([pair], material.ca)
