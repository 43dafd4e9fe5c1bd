"""Collect the log records of one module, whatever logging configuration the process has."""

from __future__ import annotations

import logging
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_OWN = vars(logging.makeLogRecord({}))
"""The attributes that every record has."""


@contextmanager
def logged(module: ModuleType) -> Iterator[list[MutableMapping[str, Any]]]:
    lines: list[MutableMapping[str, Any]] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            line = {"event": record.getMessage(), "log_level": record.levelname.lower()}
            line |= {name: value for name, value in vars(record).items() if name not in _OWN}
            lines.append(line)

    logger, handler = logging.getLogger(module.__name__), Collect()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
