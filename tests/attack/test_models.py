"""Untrusted models: no pickle is opened and no code is run.

Tests of links and pipes are in test_loading.py of the engine and test_tokenizer.py of the gateway.
"""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from galley.common.models.tokenizer import Tokenizer
from galley.core.errors import UnsupportedModel
from galley.engine.load.resolve import resolve_model
from tests.fakes import tokenizer_files


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (directory / "model.safetensors").write_bytes(b"")
    tokenizer_files.write(directory)
    return directory


@pytest.fixture
def trap(tmp_path: Path) -> Trap:
    return Trap(tmp_path / "sprung")


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.pickled = pickle.dumps(self)
        self.code = f"import os; os.mkdir({str(path)!r})"

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))

    @property
    def sprung(self) -> bool:
        return self.path.exists()


def test_the_trap_works(trap: Trap) -> None:
    pickle.loads(trap.pickled)
    assert trap.sprung


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "consolidated.00.pth"])
def test_pickled_weights_are_refused_unread(model: Path, trap: Trap, name: str) -> None:
    (model / "model.safetensors").unlink()
    (model / name).write_bytes(trap.pickled)
    with pytest.raises(UnsupportedModel, match="weights must be safetensors"):
        resolve_model(str(model))
    with pytest.raises(UnsupportedModel, match="a pickle can run code"):
        resolve_model(str(model / name))
    assert not trap.sprung


def test_pickle_is_never_opened(model: Path, trap: Trap) -> None:
    for name in ("pytorch_model.bin", "training_args.bin", "model.safetensors"):
        (model / name).write_bytes(trap.pickled)
    assert resolve_model(str(model)) == model
    with pytest.raises(UnsupportedModel, match="its weights cannot be read"):
        _load(model)
    assert not trap.sprung


def _load(model: Path) -> None:
    import torch  # noqa: PLC0415  # seconds
    from transformers import LlamaConfig  # noqa: PLC0415

    from galley.engine.load.module import load_module  # noqa: PLC0415

    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    load_module(model, config, dtype=torch.float32, device="cpu")


def test_code_of_the_models_own_is_never_run(model: Path, trap: Trap) -> None:
    for name in ("modeling_evil.py", "tokenization_evil.py", "__init__.py"):
        (model / name).write_text(trap.code)
    auto_map = {"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "modeling_evil.Config"}
    (model / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto_map}))
    with pytest.raises(UnsupportedModel, match="never run"):
        resolve_model(str(model))
    settings = {"auto_map": {"AutoTokenizer": ["tokenization_evil.Evil", None]}}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="never run"):
        Tokenizer.load(str(model))
    assert not trap.sprung
