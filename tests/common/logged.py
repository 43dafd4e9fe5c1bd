"""What one module logs, whatever has been done to logging in this process before."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import structlog
from structlog.testing import LogCapture


@contextmanager
def logged(module: ModuleType) -> Iterator[list[MutableMapping[str, Any]]]:
    """The lines of its `_log`. A logger that was used before may be bound to a configuration of before."""
    capture = LogCapture()
    logger = structlog.wrap_logger(structlog.testing.ReturnLogger(), processors=[capture])
    with patch.object(module, "_log", logger):
        yield capture.entries
