"""TLS for HTTP, from the files that gRPC uses."""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from galley.common.tls.credentials import TlsFiles
from galley.common.tls.files import WatchedFiles


def server_contexts(files: TlsFiles | None) -> WatchedFiles[ssl.SSLContext] | None:
    """Return a context of the files, made again when they change; None without files. Raise BadFile.

    Client certificates are required if the files include authorities. A client cannot resume a session of an
    earlier context, which would not be checked by the new authorities.
    """
    return None if files is None else WatchedFiles(files.named, lambda: _context_of(files))


def _context_of(files: TlsFiles) -> ssl.SSLContext:
    """Return a context of the files. Raise BadFile, also for what gRPC accepts and `ssl` does not."""
    material = files.read()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        with _as_path(material.cert or b"") as cert, _as_path(material.key or b"") as key:
            context.load_cert_chain(cert, key)
    except ssl.SSLError as error:
        raise files.cert.bad(f"cannot be used for HTTP: {error.reason}") from None
    except OSError as error:  # too many files are open
        raise files.cert.bad(error.strerror or "cannot be used", may_pass=True) from None
    if material.ca is not None:
        # OpenSSL takes ASCII; other characters can only be in comments between the certificates.
        try:
            context.load_verify_locations(cadata=material.ca.decode("ascii", errors="ignore"))
        except ssl.SSLError as error:
            raise files.ca.bad(f"cannot be used for HTTP: {error.reason}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


@contextmanager
def _as_path(content: bytes) -> Iterator[str]:
    """Yield a path that reads as `content`: `ssl` takes certificates and keys from files only.

    In memory where the system can; else in a file of this user alone, for a moment.
    """
    with (
        os.fdopen(os.memfd_create("pem", os.MFD_CLOEXEC), "wb", buffering=0)
        if hasattr(os, "memfd_create")
        else tempfile.NamedTemporaryFile(buffering=0)
    ) as file:
        file.write(content)
        yield f"/proc/self/fd/{file.fileno()}" if hasattr(os, "memfd_create") else str(file.name)
