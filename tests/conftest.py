"""Fixtures that all tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.defaults import DEFAULT_MODEL

pytest_plugins = ["tests.plugins.skips"]


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The default model, converted once into the cache that the services use."""
    from services.engine.prepare import resolve_model  # noqa: PLC0415  # transformers takes seconds

    return resolve_model(DEFAULT_MODEL)
