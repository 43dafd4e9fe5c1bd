"""Models of others: directories with pickles, links, pipes and code in them; none is followed or run."""

from __future__ import annotations

import json
import os
import pickle
from typing import TYPE_CHECKING, Any

import pytest

from services.common.tokenizer_hash import tokenizer_hash
from services.core.errors import CallerFault
from services.engine.errors import UnsupportedModel
from services.engine.prepare import resolve_model
from services.gateway.tokenizer import Tokenizer
from tests.service import tokenizer_files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SECRET = "a-key-of-somebody-else"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory that is in order, as far as it is looked at before it is loaded."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (directory / "model.safetensors").write_bytes(b"")
    tokenizer_files.write(directory)
    return directory


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A file that is none of the model's business."""
    path = tmp_path / "secret.json"
    path.write_text(json.dumps({"key": SECRET}))
    return path


class Trap:
    """What it unpickles to is a file that shows that it was."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


def test_a_model_in_order_is_taken(model: Path) -> None:
    assert resolve_model(str(model)) == model
    assert Tokenizer.load(str(model)).hash == tokenizer_hash(model)


def test_pickled_weights_are_refused_unread(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "model.pt", "model.pth"):
        (model / name).write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(UnsupportedModel, match="only pickled weights"):
        resolve_model(str(model))
    assert not (tmp_path / "sprung").exists()


def test_a_pickle_beside_safetensors_is_never_opened(model: Path, tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "training_args.bin", "model.safetensors"):
        (model / name).write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    assert resolve_model(str(model)) == model
    with pytest.raises(UnsupportedModel, match="its weights cannot be read"):
        _load(model)
    assert not (tmp_path / "sprung").exists()


def _load(model: Path) -> None:
    """As a target does, with a configuration that fits nothing."""
    import torch  # noqa: PLC0415  # seconds
    from transformers import LlamaConfig  # noqa: PLC0415

    from services.engine.loading import load_module  # noqa: PLC0415

    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    load_module(model, config, dtype=torch.float32, device="cpu")


def test_code_of_the_models_own_is_refused(model: Path, tmp_path: Path) -> None:
    code = f"import pathlib; pathlib.Path({str(tmp_path / 'sprung')!r}).mkdir()"
    (model / "modeling_evil.py").write_text(code)
    auto_map = {"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "modeling_evil.Config"}
    (model / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto_map}))
    with pytest.raises(UnsupportedModel, match="never run"):
        resolve_model(str(model))
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("load", "name"),
    [(resolve_model, name) for name in ("config.json", "model.safetensors", "tokenizer.json", "other.json")]
    + [(Tokenizer.load, "tokenizer.json"), (Tokenizer.load, "tokenizer_config.json")],
)
def test_a_link_that_leads_out_of_the_directory_is_refused_unread(
    model: Path, outside: Path, load: Callable[[str], object], name: str
) -> None:
    says = f"{name}: is a link that leads out"
    for target in (outside, model.parent, "/etc/passwd"):
        (model / name).unlink(missing_ok=True)
        (model / name).symlink_to(target)
        if name == "config.json" and not (model / name).is_file():
            continue  # then it is said to be missing
        with pytest.raises((UnsupportedModel, ValueError), match=says) as raised:
            load(str(model))
        assert SECRET not in str(raised.value)


def test_links_within_and_those_of_the_hubs_cache_are_followed(model: Path, tmp_path: Path) -> None:
    """And the directory may be a link itself: as volumes and caches are laid out."""
    hub = tmp_path / "models--some--one"
    snapshot = hub / "snapshots" / "0123abcd"
    (hub / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    volume = tmp_path / "volume"
    (volume / "..2026").mkdir(parents=True)
    (volume / "..data").symlink_to("..2026")
    for path in model.iterdir():
        (hub / "blobs" / path.name).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
        (volume / "..2026" / path.name).write_bytes(path.read_bytes())
        (volume / path.name).symlink_to(f"..data/{path.name}")
    (tmp_path / "current").symlink_to(model)
    for directory in (snapshot, volume, tmp_path / "current"):
        assert resolve_model(str(directory)) == directory.resolve()
        assert Tokenizer.load(str(directory)).hash == tokenizer_hash(model)


def test_a_pipe_is_refused_and_not_waited_for(model: Path) -> None:
    os.mkfifo(model / "generation_config.json")
    with pytest.raises(UnsupportedModel, match="is no file"):
        resolve_model(str(model))


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b", "..", ""])
def test_an_index_that_names_files_elsewhere_is_refused(model: Path, name: str) -> None:
    index = {"metadata": {}, "weight_map": {"model.norm.weight": name}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedModel, match="no safetensors file beside it"):
        resolve_model(str(model))


@pytest.mark.parametrize("said", ["[]", "{", '{"weight_map": []}', "[" * 100_000, "null"])
def test_an_index_that_is_none_is_refused(model: Path, said: str) -> None:
    (model / "model.safetensors.index.json").write_text(said)
    with pytest.raises(UnsupportedModel, match="no index"):
        resolve_model(str(model))


def test_what_is_refused_is_told_in_one_line_at_the_start() -> None:
    assert issubclass(UnsupportedModel, CallerFault)
