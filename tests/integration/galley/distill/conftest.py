"""A tiny target that answers in its own way, and what is distilled from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.fakes.tiny_model import random_llama, save

_TEMPLATE = "{% for message in messages %}w2 {{ message.content }} w3{% endfor %}"


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of two random layers with small effect, so that one layer can learn them."""
    folder = tmp_path_factory.mktemp("target")
    model = random_llama(hidden_size=32, spread=0.3, seed=3)
    with torch.no_grad():
        model.lm_head.weight.mul_(3.0)
    save(model, folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": _TEMPLATE}))
    return folder


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "log.jsonl"
    lines = [
        json.dumps({"id": f"{i}", "prompt": f"w{4 + i % 60} w{4 + i // 60}", "workload": ("a", "b")[i % 2]})
        for i in range(160)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path
