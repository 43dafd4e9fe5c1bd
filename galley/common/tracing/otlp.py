"""Settings of OTLP export from the `OTEL_*` environment, for traces and metrics."""

from __future__ import annotations

import logging
import os
from typing import Literal, TypeAlias

_LOG = logging.getLogger(__name__)

Signal: TypeAlias = Literal["traces", "metrics"]

GRPC, HTTP = "grpc", "http/protobuf"

FLUSH_S = 3.0
"""Longest time that a process waits at its end for the collector."""


def is_exported(signal: Signal) -> bool:
    name = signal.upper()
    if not variable("ENDPOINT", signal)[1]:
        return False
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if os.environ.get(f"OTEL_{name}_EXPORTER", "otlp").lower() == "none":
        return False
    variable_name, protocol = variable("PROTOCOL", signal)
    if protocol not in {"", GRPC, HTTP}:
        _LOG.warning("%s are off: %s: must be %s or %s, got %s", signal, variable_name, GRPC, HTTP, protocol)
        return False
    return True


def is_http(signal: Signal) -> bool:
    """Return True if the signal goes by HTTP. Raise ValueError if its endpoint is no URL."""
    if variable("PROTOCOL", signal)[1] != HTTP:
        return False
    name, endpoint = variable("ENDPOINT", signal)
    if not endpoint.startswith(("http://", "https://")):
        raise ValueError(f"{name}: must begin with http:// or https:// for {HTTP}, got {endpoint}")
    return True


def variable(what: str, signal: Signal) -> tuple[str, str]:
    """Return the name and value of the signal's own variable if it is set, else of the general one."""
    own, general = f"OTEL_EXPORTER_OTLP_{signal.upper()}_{what}", f"OTEL_EXPORTER_OTLP_{what}"
    return (own, value) if (value := os.environ.get(own, "")) else (general, os.environ.get(general, ""))
