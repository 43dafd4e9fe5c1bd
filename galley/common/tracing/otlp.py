"""What the `OTEL_*` environment says of exporting, the same for traces and metrics."""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import Literal, TypeAlias
from uuid import uuid4

from opentelemetry.sdk.resources import Resource

from galley.version import __version__

_LOG = logging.getLogger(__name__)

Signal: TypeAlias = Literal["traces", "metrics"]

FLUSH_S = 3.0
"""How long a process waits at its end for a collector to take what is left: one that is away must not hold
up an exit."""


def exports(signal: Signal) -> bool:
    """Whether this process is to send them somewhere."""
    name = signal.upper()
    if not told("ENDPOINT", signal)[1]:
        return False
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if os.environ.get(f"OTEL_{name}_EXPORTER", "otlp").lower() == "none":
        return False
    protocol = told("PROTOCOL", signal)[1] or "grpc"
    if protocol != "grpc":
        _LOG.warning("%s are off: OTEL_EXPORTER_OTLP_PROTOCOL is %s, only grpc is served", signal, protocol)
        return False
    return True


def resource_of(service_name: str) -> Resource:
    """What all that this process sends says of it."""
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415  # off costs nothing

    return Resource.create(
        {
            "service.name": os.environ.get("OTEL_SERVICE_NAME") or service_name,
            "service.namespace": "galley",
            "service.version": __version__,
            "service.instance.id": _instance_id(),
        }
    )


@cache
def _instance_id() -> str:
    """Of this life of the process."""
    return str(uuid4())


def told(what: str, signal: Signal) -> tuple[str, str]:
    """The signal's own setting, else that of all: the name of the variable, and what it says, if anything."""
    own, general = f"OTEL_EXPORTER_OTLP_{signal.upper()}_{what}", f"OTEL_EXPORTER_OTLP_{what}"
    return (own, said) if (said := os.environ.get(own, "")) else (general, os.environ.get(general, ""))
