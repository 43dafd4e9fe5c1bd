"""What a module logs, whatever has been done to logging in this process before."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest.mock import patch

import structlog
from structlog.testing import capture_logs

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping
    from types import ModuleType
    from typing import Any


@contextmanager
def logged(module: ModuleType) -> Iterator[list[MutableMapping[str, Any]]]:
    """The lines of its `_log`. A logger that was used before may be bound to a configuration of before."""
    with capture_logs() as logs, patch.object(module, "_log", structlog.get_logger(module.__name__)):
        yield logs
