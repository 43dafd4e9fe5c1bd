"""One stack of real processes for all end-to-end tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.e2e.matrix import FEW_SPOILS
from tests.e2e.reference import Reference
from tests.e2e.stacks import DRAFT_LAYERS, Clients, running_clients
from tests.fakes.truncated_model import truncate_model


@pytest.fixture(scope="session")
def draft_model(default_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained draft: a few layers of the target."""
    return truncate_model(default_model_dir, list(DRAFT_LAYERS), tmp_path_factory.mktemp("models") / "draft")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def clients(draft_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Clients]:
    """The system in float32, with every kind of draft."""
    async with running_clients(tmp_path_factory.mktemp("stack"), draft_model, spoils=FEW_SPOILS) as running:
        yield running


@pytest.fixture(scope="session")
def reference(default_model_dir: Path) -> Reference:
    """transformers alone."""
    return Reference(default_model_dir)
