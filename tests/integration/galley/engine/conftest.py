from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from galley.engine.model import CausalModel
from tests.fakes.model_configs import save_random

MakeModel = Callable[[Any], Path]


@pytest.fixture(scope="session")
def default_model(default_model_dir: Path) -> CausalModel:
    return CausalModel.load(default_model_dir, dtype=torch.float32, device="cpu", threads=1)


@pytest.fixture(scope="session")
def default_reference(default_model_dir: Path) -> Any:
    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(default_model_dir, dtype=torch.float32, attn_implementation="sdpa").eval()


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    return lambda config: save_random(config, tmp_path / str(config.model_type))
