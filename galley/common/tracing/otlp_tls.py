"""TLS to an OTLP collector, by files that the `OTEL_*` environment names and that may be replaced meanwhile.

The SDK's exporters read them once. A connection that stands is kept; but when a collector cannot be reached,
as when it no longer trusts what it is shown, they make a new channel: here, by the files as they are then.

Imports the SDK: to be imported where something is exported.
"""

from __future__ import annotations

from typing import Any

from opentelemetry.exporter.otlp.proto.grpc.exporter import OTLPExporterMixin

from galley.common.tls.credentials import Material, TlsFiles, channel_credentials
from galley.common.tls.files import BadFile, NamedFile, WatchedFiles
from galley.common.tracing.otlp import Signal, told

_FILES = ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY")


class ReloadingExporter(OTLPExporterMixin[Any, Any, Any, Any]):
    """To be named before the SDK's exporter of `signal` among the bases of a class."""

    signal: Signal

    def __init__(self) -> None:
        """Raises ValueError if a file is of no use, and says which variable names it."""
        self._files = _watched(self.signal)
        super().__init__()  # type: ignore[call-arg]  # the SDK's own exporter comes next, and needs nothing

    def _initialize_channel_and_stub(self) -> None:
        """Called by the SDK at the start, and whenever the collector could not be reached."""
        if self._files is not None and not self._insecure:
            self._credentials = channel_credentials(self._files.current())
        super()._initialize_channel_and_stub()  # type: ignore[no-untyped-call]  # is untyped


def _plain(signal: Signal) -> bool:
    """Whether the collector is spoken to without TLS, as the SDK decides it."""
    endpoint, insecure = told("ENDPOINT", signal)[1], told("INSECURE", signal)[1]
    if endpoint.startswith("https://"):
        return False
    return insecure.lower() == "true" if insecure else endpoint.startswith("http://")


def _watched(signal: Signal) -> WatchedFiles[Material] | None:
    """None where no file is named, when the SDK trusts the public authorities, or none is of use."""
    ca, cert, key = (NamedFile(*told(what, signal)) for what in _FILES)
    if _plain(signal) or not (ca.path or cert.path or key.path):
        return None
    try:
        return TlsFiles(ca, cert, key).watch()
    except BadFile as error:
        raise ValueError(str(error)) from None
