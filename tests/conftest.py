"""Fixtures that all tests share."""

from __future__ import annotations

import functools
import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

from galley.common.models.files import DEFAULT_MODEL

# Runs are repeatable, and slow machines miss no deadline.
settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci")

pytest_plugins = ["tests.plugins.skips", "tests.plugins.vllm", "tests.plugins.order"]

# A shell's background job ignores SIGINT and its processes inherit that; those that tests interrupt must not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _logging_restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what a command run in this process does to logging; no logger is cached for the next test."""
    configure, before = structlog.configure, structlog.get_config()
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    @functools.wraps(configure)
    def configure_uncached(**options: object) -> None:
        configure(**{**options, "cache_logger_on_first_use": False})  # type: ignore[arg-type]

    monkeypatch.setattr(structlog, "configure", configure_uncached)
    yield
    configure(**before)
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """Return the directory of the default model, converted once into the cache that the services use."""
    from galley.engine.load.resolve import resolve_model  # noqa: PLC0415  # transformers takes seconds

    return resolve_model(DEFAULT_MODEL)
