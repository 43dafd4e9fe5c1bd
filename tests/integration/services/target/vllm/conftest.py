"""Cores of vLLM with the tiny model; one of them lives at a time, since each takes this process's threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from services.target.settings import TargetSettings
from tests.fakes.core_runs import Reference

if TYPE_CHECKING:
    from services.target.engine.vllm.core import VllmCore

# vLLM and what it imports warn of their own affairs, such as torch's deprecations.
# A start takes minutes on a busy machine, in which each rank imports vLLM.
MARKS = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]
BLOCK_TOKENS = 32


@contextmanager
def started_core(model: Path | str, **given: object) -> Iterator[VllmCore]:
    """Yield a core without the checks of a replica's start."""
    from galley.engine.load.resolve import resolve_model  # noqa: PLC0415
    from services.target.engine.vllm.core import start  # noqa: PLC0415

    settings = TargetSettings(model=str(model), dtype="float32", kv_memory_mb=64, max_sessions=16)
    core = start(settings, resolve_model(str(model)), {"block_size": BLOCK_TOKENS, **given})
    try:
        yield core
    finally:
        core.close()


@pytest.fixture(scope="module")
def poisoned_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.fakes.tiny_model import VLLM_HEAD_SIZE, save_tiny_model  # noqa: PLC0415

    directory = tmp_path_factory.mktemp("poisoned")
    return save_tiny_model(directory, poisoned=True, head_size=VLLM_HEAD_SIZE)


@pytest.fixture(scope="module")
def core(poisoned_dir: Path) -> Iterator[VllmCore]:
    """Yield a core with room for all."""
    with started_core(poisoned_dir) as made:
        yield made


@pytest.fixture(scope="module")
def reference(poisoned_dir: Path) -> Reference:
    return Reference(poisoned_dir)
