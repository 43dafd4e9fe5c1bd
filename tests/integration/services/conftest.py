"""A tiny model for the tests of all services."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.fakes.tiny_model import save_tiny_model  # noqa: PLC0415  # transformers takes seconds

    return save_tiny_model(tmp_path_factory.mktemp("tiny"))
