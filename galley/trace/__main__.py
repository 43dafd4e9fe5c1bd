"""Run the collector of `galley up --trace`: `python -m galley.trace --file traces.jsonl`."""

from __future__ import annotations

import os

from galley.common.server.server import Prepared, run_main
from galley.trace.collector import CollectorSettings, build

_DESCRIPTION = "A small OTLP collector: receives spans by gRPC and appends them to a file as JSON lines."


def main() -> None:
    # Otherwise the collector would trace the calls that export traces.
    os.environ["OTEL_SDK_DISABLED"] = "true"
    run_main(CollectorSettings, "tracing", _DESCRIPTION, lambda settings: Prepared(build(settings)))


if __name__ == "__main__":
    main()
