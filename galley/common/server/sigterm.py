"""Handle SIGTERM while a process still imports its modules. Imports the standard library only."""

from __future__ import annotations

import os
import signal


def heed_sigterm() -> None:
    """Exit 0 at SIGTERM until the service installs its own handler; call before slow imports.

    The kernel drops signals without a handler for the first process of a container, which would then run
    until it is killed.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # nothing is open yet
