"""Gauges of the expiry of a process's certificates, read from its files."""

from __future__ import annotations

from galley.common.metrics.catalogue import PEER_CERTIFICATE_EXPIRY, SERVED_CERTIFICATE_EXPIRY
from galley.common.metrics.metric import LabelValues, Metric
from galley.common.metrics.registry import Registry
from galley.common.tls.credentials import Material
from galley.common.tls.files import WatchedFiles

Files = WatchedFiles[Material] | None


def observe_served(registry: Registry, files: Files) -> None:
    """Register the expiry of the server's certificate; absent without one."""
    _observe(registry, SERVED_CERTIFICATE_EXPIRY, files)


def observe_peers(registry: Registry, files: Files) -> None:
    """Register the expiry of the certificate that a gateway presents to replicas."""
    _observe(registry, PEER_CERTIFICATE_EXPIRY, files)


def _observe(registry: Registry, metric: Metric, files: Files) -> None:
    def read() -> list[tuple[LabelValues, float]]:
        expires = None if files is None else files.current().expires
        return [] if expires is None else [((), expires.timestamp())]

    registry.observe(metric, read)
