"""A part that only acts: tells stages, is ready, waits for SIGTERM. Flags make it misbehave."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from galley.common.tracing.telemetry import Telemetry


def record_span(name: str) -> Telemetry:
    """End a span and return what exports it, which need not be shut down for that."""
    from galley.common.tracing.telemetry import start_telemetry  # noqa: PLC0415  # takes half a second

    telemetry = start_telemetry("stand-in", as_global=False)
    telemetry.tracer("stand-in").start_span(name).end()
    return telemetry


def main() -> int:
    flags = argparse.ArgumentParser()
    flags.add_argument("--ready-fd", type=int)
    flags.add_argument("--say", action="append", default=[])
    flags.add_argument("--die", type=int)
    flags.add_argument("--mute", action="store_true")
    flags.add_argument("--garble", action="store_true")
    flags.add_argument("--stubborn", action="store_true")
    flags.add_argument("--metrics")
    flags.add_argument("--span")
    given = flags.parse_args()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    for word in given.say:
        sys.stdout.write(f"{word}\n")
    with os.fdopen(given.ready_fd, "w", buffering=1) as pipe:
        print(json.dumps({"stage": "loading"}), file=pipe)
        if given.garble:
            print("not JSON", file=pipe)
        if given.die is not None:
            return int(given.die)
        if not given.mute:
            facts = {"metrics": given.metrics} if given.metrics else {}
            print(json.dumps({"stage": "ready", "address": f"127.0.0.1:{os.getpid()}", **facts}), file=pipe)
            pipe.close()
        telemetry = record_span(given.span) if given.span else None
        while True:
            signal.sigwait([signal.SIGTERM])
            if telemetry is not None:
                telemetry.shutdown()
            if not given.stubborn:
                return 0


if __name__ == "__main__":
    sys.exit(main())
