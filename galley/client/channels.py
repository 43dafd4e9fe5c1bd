"""The TLS of a client: files that are checked with the standard library, and may be replaced while in use."""

from __future__ import annotations

import ssl

from galley.client.errors import BadTlsFile
from galley.client.options import Tls
from galley.common.tls.channels import ChannelTls, Material
from galley.common.tls.files import CHECK_INTERVAL_S, NamedFile, WatchedFiles


def tls_to_gateways(tls: Tls) -> ChannelTls:
    """Return the TLS of channels. Raises BadTlsFile if a file cannot be used."""
    files = [NamedFile(name, getattr(tls, name)) for name in ("ca_file", "cert_file", "key_file")]

    def read() -> Material:
        return _read(*files)

    used = [file for file in files if file.path]
    return ChannelTls(WatchedFiles(used, read, check_interval_s=CHECK_INTERVAL_S), tls.server_name)


def _read(ca: NamedFile, cert: NamedFile, key: NamedFile) -> Material:
    for file, other in ((cert, key), (key, cert)):
        if other.path and not file.path:
            raise BadTlsFile(file.setting, f"required with {other.setting}")
    ca_pem, cert_pem, key_pem = (file.read() if file.path else None for file in (ca, cert, key))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca_pem is not None:
        try:
            context.load_verify_locations(cadata=ca_pem.decode())
        except (ssl.SSLError, ValueError):
            raise ca.bad("holds no certificate") from None
    if key_pem is not None:
        if b"PRIVATE KEY-----" not in key_pem:
            raise key.bad("holds no private key")
        try:
            # The empty password keeps OpenSSL from asking for one on the terminal.
            context.load_cert_chain(cert.path, key.path, password="")
        except (ssl.SSLError, OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise cert.bad(f"cannot be used with key_file: {reason}") from None
    return Material(ca_pem, cert_pem, key_pem)
