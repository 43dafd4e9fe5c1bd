"""Files of traces, as the collector writes them."""

from __future__ import annotations

from pathlib import Path

from galley.trace.read.otlp_file import OtlpFile
from tests.fakes.trace_builder import Scene, otlp

# As large as the SDK's batches are by default.
_SPANS_A_LINE = 512


def write(scene: Scene, path: Path) -> Path:
    """The spans of the scene, in batches as an exporter sends them."""
    file = OtlpFile(path)
    for start in range(0, len(scene.spans), _SPANS_A_LINE):
        file.append(otlp(scene.spans[start : start + _SPANS_A_LINE]))
    file.close()
    return path
