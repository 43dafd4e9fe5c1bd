"""TLS to an OTLP collector with files that may be replaced while the process runs.

The SDK's exporters read the files of the `OTEL_*` environment once. When the collector cannot be reached they
make a new channel; here, with the current files.

Imports the SDK: import this module only where something is exported.
"""

from __future__ import annotations

from typing import Any

from opentelemetry.exporter.otlp.proto.grpc.exporter import OTLPExporterMixin

from galley.common.tls.credentials import Material, TlsFiles, channel_credentials
from galley.common.tls.files import BadFile, NamedFile, WatchedFiles
from galley.common.tracing.otlp import Signal, variable

_FILES = ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY")


class ReloadingExporter(OTLPExporterMixin[Any, Any, Any, Any]):
    """Mixin before the SDK's exporter of `signal`."""

    signal: Signal

    def __init__(self) -> None:
        """Load the files. Raise ValueError with the variable that names a bad one."""
        self._files = _watched(self.signal)
        super().__init__()  # type: ignore[call-arg]  # the SDK's own exporter comes next, and needs nothing

    def _initialize_channel_and_stub(self) -> None:
        """Make a channel; the SDK calls this at the start and after failures."""
        if self._files is not None and not self._insecure:
            self._credentials = channel_credentials(self._files.current())
        super()._initialize_channel_and_stub()  # type: ignore[no-untyped-call]  # is untyped


def _plain(signal: Signal) -> bool:
    """Return True if the SDK would connect without TLS."""
    endpoint, insecure = variable("ENDPOINT", signal)[1], variable("INSECURE", signal)[1]
    if endpoint.startswith("https://"):
        return False
    return insecure.lower() == "true" if insecure else endpoint.startswith("http://")


def _watched(signal: Signal) -> WatchedFiles[Material] | None:
    """Return the watched files; None without TLS or without files (public authorities)."""
    ca, cert, key = (NamedFile(*variable(what, signal)) for what in _FILES)
    if _plain(signal) or not (ca.path or cert.path or key.path):
        return None
    try:
        return TlsFiles(ca, cert, key).watch()
    except BadFile as error:
        raise ValueError(str(error)) from None
