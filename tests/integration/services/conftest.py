"""A tiny model for the tests of all services."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.fakes.tiny_model import save_tiny_model  # noqa: PLC0415  # transformers takes seconds

    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with a token whose logits are NaN."""
    from tests.fakes.tiny_model import save_tiny_model  # noqa: PLC0415  # transformers takes seconds

    return save_tiny_model(tmp_path_factory.mktemp("poisoned"), poisoned=True)
