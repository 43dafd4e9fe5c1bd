"""The viewer of `galley up --trace`: Arize Phoenix if it is installed, else a file for `galley trace`."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from galley.stack.part import PartSpec
from galley.stack.probes import LOOPBACK, free_ports
from galley.trace.read.otlp_file import new_file, trace_dir

_PHOENIX = "arize-phoenix"


@dataclass(frozen=True, slots=True)
class Viewer:
    part: PartSpec
    note: str


def find_viewer() -> Viewer:
    """Return the best viewer that is installed. Raises OSError."""
    directory = trace_dir()
    return _phoenix(directory / "phoenix") if _has_phoenix() else _collector(new_file(directory))


def export_to(address: str) -> Mapping[str, str]:
    """Return the environment of a process that sends its traces, and nothing else, to `address`."""
    return {
        "OTEL_SDK_DISABLED": "false",
        "OTEL_TRACES_EXPORTER": "otlp",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"http://{address}",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc",
        "OTEL_EXPORTER_OTLP_TRACES_INSECURE": "true",
    }


def _collector(file: Path) -> Viewer:
    command = [sys.executable, "-P", "-m", "galley.trace", "--file", str(file)]
    part = PartSpec("traces", lambda _: command, vital=False)
    return Viewer(part, f"traces go to {file}; galley trace --list shows them")


def _has_phoenix() -> bool:
    # By the distribution's name: importing takes seconds, and other packages are called phoenix, too.
    try:
        importlib.metadata.version(_PHOENIX)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _phoenix(directory: Path) -> Viewer:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    grpc_port, http_port = free_ports(2)
    environment = {
        "PHOENIX_HOST": LOOPBACK,
        "PHOENIX_PORT": str(http_port),
        "PHOENIX_GRPC_PORT": str(grpc_port),
        "PHOENIX_WORKING_DIR": str(directory),
        # Do not report each start to its makers, nor load fonts from the network.
        "PHOENIX_TELEMETRY_ENABLED": "false",
        "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
        # An assistant with a shell is not needed to look at traces.
        "PHOENIX_DISABLE_AGENT_ASSISTANT": "true",
        "PHOENIX_AGENTS_DISABLE_BASH": "true",
    }
    part = PartSpec(
        "phoenix",
        lambda _: [sys.executable, "-P", "-m", "phoenix.server.main", "serve"],
        ports=(grpc_port, http_port),
        environment=lambda _: environment,
        vital=False,
    )
    return Viewer(part, f"traces at http://{LOOPBACK}:{http_port} (Arize Phoenix)")
