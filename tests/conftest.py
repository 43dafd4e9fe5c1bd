"""Fixtures that all tests share."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from galley.common.config.defaults import DEFAULT_MODEL

# The same examples each time, however slow the machine is.
settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci")

pytest_plugins = ["tests.plugins.skips"]

# A shell's background jobs ignore SIGINT, and hand that down; a process that a test interrupts must not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The default model, converted once into the cache that the services use."""
    from galley.engine.load.resolve import resolve_model  # noqa: PLC0415  # transformers takes seconds

    return resolve_model(DEFAULT_MODEL)
