"""To be told to end while a process still imports what it runs."""

from __future__ import annotations

import os
import signal


def heed_sigterm() -> None:
    """End at SIGTERM, with 0, until the service says what else to do; call before what takes time to import.

    The first process of a container is one that the kernel spares from signals it has no handler for: told to
    end in its first seconds it would go on until it is killed, when its grace is over.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # nothing is open yet
