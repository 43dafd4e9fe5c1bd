"""The API key or token that a client sends with every call, and the TLS of its channels.

A token may be valid for minutes only, so a file or a callable is read again for each call.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from galley.client.errors import BadKey, BadTlsFile
from galley.client.options import Tls
from galley.common.regular_file import read_regular
from galley.common.tls.channels import ChannelTls, Material
from galley.common.tls.files import CHECK_INTERVAL_S, NamedFile, WatchedFiles

API_KEY_VARIABLE = "GALLEY_API_KEY"
API_KEY_FILE_VARIABLE = "GALLEY_API_KEY_FILE"
_MAX_KEY_FILE_BYTES = 64 * 1024

Key: TypeAlias = str | Callable[[], str]
"""An API key or token, or a callable that returns the current one."""


def key_metadata(key: Key) -> tuple[tuple[str, str], ...]:
    """Return the metadata that sends the current key; empty without one. Raises BadKey."""
    current = key() if callable(key) else key
    if not current:
        return ()
    # gRPC refuses such metadata with a message that does not name the cause.
    if not (current.isascii() and current.isprintable()):
        raise BadKey(
            "the API key must be one line of printable ASCII characters "
            f"({API_KEY_VARIABLE}, {API_KEY_FILE_VARIABLE} or `api_key`)"
        )
    return (("authorization", f"Bearer {current}"),)


def environment_key() -> Key:
    """Return a reader of the file that GALLEY_API_KEY_FILE names, else GALLEY_API_KEY, else an empty key."""
    if file := os.environ.get(API_KEY_FILE_VARIABLE):
        return lambda: _read_key(Path(file))
    return os.environ.get(API_KEY_VARIABLE, "")


def _read_key(path: Path) -> str:
    try:
        key = read_regular(path, _MAX_KEY_FILE_BYTES).decode().rstrip("\r\n")
    except OSError as error:
        raise BadKey(f"{API_KEY_FILE_VARIABLE}: {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        key = ""
    except ValueError as error:
        raise BadKey(f"{API_KEY_FILE_VARIABLE}: {path}: {error}") from None
    if not key:
        raise BadKey(f"{API_KEY_FILE_VARIABLE}: {path}: must hold the key as UTF-8 text, got none")
    return key


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
            raise ca.bad("must hold a certificate in PEM") from None
    if key_pem is not None:
        if b"PRIVATE KEY-----" not in key_pem:
            raise key.bad("must hold a private key in PEM")
        try:
            # The empty password keeps OpenSSL from asking for one on the terminal.
            context.load_cert_chain(cert.path, key.path, password="")
        except (ssl.SSLError, OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise cert.bad(f"cannot be used with key_file: {reason}") from None
    return Material(ca_pem, cert_pem, key_pem)
