"""TLS of servers and channels, from PEM files that may be replaced while in use (docs/operate/tls.md)."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

import grpc

from galley.common.tls.files import BadFile, NamedFile, WatchedFiles

if TYPE_CHECKING:
    from galley.common.config.settings import ServiceSettings


@dataclass(frozen=True, slots=True)
class Material:
    """What the files hold, and when their certificate ends; None where there is no such file."""

    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    expires: datetime | None = None


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Authorities, and a certificate with its key, of a client or of who `serves`; an empty path is none."""

    ca: NamedFile
    cert: NamedFile
    key: NamedFile
    serves: bool = False

    def read(self) -> Material:
        """Read and check them. Raises BadFile."""
        from galley.common.tls import pem  # noqa: PLC0415  # what imports this may have no use for TLS

        for file, other in ((self.cert, self.key), (self.key, self.cert)):
            if other.path and not file.path:
                raise BadFile(file.setting, f"is missing; it goes together with {other.setting}")
        ca = pem.read_authorities(self.ca) if self.ca.path else None
        if not self.cert.path:
            return Material(ca)
        return Material(ca, *pem.read_pair(self.cert, self.key, serves=self.serves))

    def watch(self, look_every_s: float = 0.0) -> WatchedFiles[Material]:
        """The same, read anew when they change. Raises BadFile."""
        named = [file for file in (self.ca, self.cert, self.key) if file.path]
        return WatchedFiles(named, self.read, look_every_s=look_every_s)


def server_files(settings: ServiceSettings) -> WatchedFiles[Material] | None:
    """What a server of these settings shows, and whom it trusts; None: it speaks no TLS. Raises BadFile."""
    if not settings.tls_cert_file:
        return None
    return TlsFiles(
        NamedFile("tls_client_ca_file", settings.tls_client_ca_file),
        NamedFile("tls_cert_file", settings.tls_cert_file),
        NamedFile("tls_key_file", settings.tls_key_file),
        serves=True,
    ).watch()


def server_credentials(files: WatchedFiles[Material] | None) -> grpc.ServerCredentials | None:
    """How a server speaks TLS by these files.

    gRPC asks before each handshake, from a thread of its own, whether there is anything new.
    """
    if files is None:
        return None
    given = files.current()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal given
        if (now := files.current()) is given:
            return None
        given = now
        return _configuration(now)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(given),
        fetch,  # type: ignore[arg-type]  # may return None, as gRPC documents
        require_client_authentication=given.ca is not None,
    )


def _configuration(material: Material) -> grpc.ServerCertificateConfiguration:
    pair = (material.key or b"", material.cert or b"")
    return grpc.ssl_server_certificate_configuration([pair], material.ca)


def channel_credentials(material: Material) -> grpc.ChannelCredentials:
    """Without authorities, the public ones that gRPC brings are trusted."""
    return grpc.ssl_channel_credentials(material.ca, material.key, material.cert)
