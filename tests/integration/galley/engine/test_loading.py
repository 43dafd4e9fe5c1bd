from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import safetensors.torch
import torch
import transformers
from huggingface_hub.errors import LocalEntryNotFoundError

from galley.common.models.files import DEFAULT_MODEL, NoTokenizer, tokenizer_hash
from galley.core.errors import Unavailable, UnsupportedModel
from galley.engine.load import resolve as prepare
from galley.engine.load.module import default_dtype, eos_token_ids, load_config, parse_dtype
from galley.engine.load.resolve import resolve_model
from galley.engine.load.support import cache_dir, file_digest, read_weights
from galley.engine.model import CausalModel, Rows
from tests.fakes.failing_file import FAILING
from tests.fakes.tiny_gguf import save_tiny_gguf
from tests.fakes.truncated_model import truncate_model

SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GALLEY_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def model_files(directory: Path, config: dict[str, Any], weights: str = "model.safetensors") -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    (directory / weights).write_bytes(b"")
    return directory


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GALLEY_CACHE_DIR", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_dir() == Path("/a")
    monkeypatch.delenv("GALLEY_CACHE_DIR")
    assert cache_dir() == Path("/b/galley")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "galley"


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    directory = model_files(tmp_path / "m", {"model_type": "llama"})
    assert resolve_model(str(directory)) == directory


def test_a_hub_id_is_downloaded_without_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = model_files(tmp_path / "m", {"model_type": "llama"})
    downloads: list[tuple[str, str | None, list[str]]] = []

    def download(
        hub_id: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        downloads.append((hub_id, revision, allow_patterns))
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("someone/model") == resolve_model(f"someone/model@{'c0ffee' * 6}1234") == directory
    (*_, patterns), _ = downloads
    assert [(hub_id, revision) for hub_id, revision, _ in downloads] == [
        ("someone/model", None),
        ("someone/model", f"{'c0ffee' * 6}1234"),
    ]
    assert "*.safetensors" in patterns
    assert not any("bin" in pattern or pattern == "*" or "py" in pattern for pattern in patterns)


def test_a_hub_id_that_is_not_cached_is_refused_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(hub_id: str, **_: object) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(UnsupportedModel, match=r"someone/model: not in the hub's cache"):
        resolve_model("someone/model")


@pytest.mark.parametrize("spec", ["not a/hub id/at all", "/no/such/file.gguf"])
def test_an_unknown_name_is_refused(spec: str) -> None:
    with pytest.raises(UnsupportedModel):
        resolve_model(spec)


def test_a_digest_follows_the_content(tmp_path: Path, own_cache: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    first = file_digest(path)
    assert file_digest(path) == first
    path.write_bytes(b"other")
    assert file_digest(path) != first
    assert len(list((own_cache / "digests").iterdir())) == 2


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "x", "auto_map": {"AutoModelForCausalLM": "m.M"}}, "code from its repository"),
        (
            {"model_type": "x", "transformers_weights": "adapter_model.bin"},
            "config.json must not set transformers_weights",
        ),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "gemma3", "text_config": {"a": 1}}, "composite"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}, "quantized"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_before_loading(
    config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        resolve_model(str(model_files(tmp_path / "m", config)))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.MambaConfig(num_hidden_layers=1), "recurrent state"),
        (transformers.T5Config(), "encoder-decoder"),
        (transformers.BloomConfig(n_layer=1), "AttentionInterface"),
        (transformers.ViTConfig(), "must be a causal language model"),
        (transformers.Qwen3NextConfig(num_hidden_layers=4), "recurrent state|layers must be full"),
        (
            transformers.LlamaConfig(
                **SMALL, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
            ),
            "rope_type must not depend.*'dynamic'",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_a_model_with_other_state_than_kv_is_refused(config: Any, reason: str, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match=reason):
        load_config(tmp_path)


@pytest.mark.parametrize("content", ["[]", "{", "[" * 100_000], ids=["a list", "broken", "deep"])
def test_a_damaged_config_is_refused(content: str, tmp_path: Path) -> None:
    directory = model_files(tmp_path / "m", {})
    (directory / "config.json").write_text(content)
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        resolve_model(str(directory))


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    directory = model_files(tmp_path / "m", {"model_type": "llama"}, "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match=r"must be safetensors, got pytorch_model\.bin"):
        resolve_model(str(directory))
    (directory / "pytorch_model.bin").unlink()
    with pytest.raises(UnsupportedModel, match=r"must hold \*\.safetensors"):
        resolve_model(str(directory))
    (directory / "config.json").unlink()
    with pytest.raises(UnsupportedModel, match=r"must hold config\.json"):
        resolve_model(str(directory))


PROGRAM = pickle.dumps(print)


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"])
def test_a_pickled_file_is_refused_by_name(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model{suffix}"
    path.write_bytes(PROGRAM)
    with pytest.raises(UnsupportedModel, match="a pickle can run code, so it is never opened"):
        resolve_model(str(path))


def test_a_pickle_named_safetensors_is_not_run(make_model: Callable[[Any], Path]) -> None:
    directory = make_model(transformers.LlamaConfig(**SMALL))
    (directory / "model.safetensors").write_bytes(PROGRAM)
    with pytest.raises(UnsupportedModel, match="its weights cannot be read"):
        CausalModel.load(directory, dtype=torch.float32, device="cpu", threads=1)


def test_a_disk_that_fails_is_no_fault_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(FAILING)
    with pytest.raises(Unavailable, match=r"model\.safetensors: cannot be read: Input/output error"):
        read_weights(transformers.LlamaForCausalLM, tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        ({"a": "../other.safetensors"}, "must name safetensors files beside it"),
        ({"a": "/etc/model.safetensors"}, "must name safetensors files beside it"),
        ({"a": "pytorch_model.bin"}, "must name safetensors files beside it"),
        ({"a": 7}, "must name safetensors files beside it"),
        ({"a": "model-2.safetensors"}, "must name existing files"),
        (["model.safetensors"], "must be an index"),
        (None, "must be an index"),
    ],
)
def test_an_index_names_safetensors_beside_it(weight_map: object, reason: str, tmp_path: Path) -> None:
    directory = model_files(tmp_path / "m", {"model_type": "llama"})
    (directory / "pytorch_model.bin").write_bytes(PROGRAM)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UnsupportedModel, match=reason):
        resolve_model(str(directory))
    good = {"weight_map": {"a": "model.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(good))
    assert resolve_model(str(directory)) == directory


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "vocab.txt"])
@pytest.mark.parametrize("absolute", [True, False], ids=["absolute", "relative"])
def test_a_link_that_leads_out_is_refused(name: str, absolute: bool, tmp_path: Path) -> None:
    directory = model_files(tmp_path / "m", {"model_type": "llama"})
    (tmp_path / "elsewhere").write_text("{}")
    (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to(tmp_path / "elsewhere" if absolute else "../elsewhere")
    with pytest.raises(UnsupportedModel, match=f"{name}: is a link that leads out"):
        resolve_model(str(directory))


def test_dangling_links_and_fifos_are_refused(tmp_path: Path) -> None:
    directory = model_files(tmp_path / "m", {"model_type": "llama"})
    (directory / "tokenizer.json").symlink_to("tokenizer.json")
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.json: is a link to nothing"):
        resolve_model(str(directory))
    (directory / "tokenizer.json").unlink()
    os.mkfifo(directory / "tokenizer.json")
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.json: must be a file"):
        resolve_model(str(directory))


def test_links_within_a_directory_and_a_link_to_one_are_followed(tmp_path: Path) -> None:
    directory = model_files(tmp_path / "m", {"model_type": "llama"})
    (directory / "..data").mkdir()
    (directory / "config.json").rename(directory / "..data" / "config.json")
    (directory / "config.json").symlink_to("..data/config.json")
    (tmp_path / "link").symlink_to("m")
    assert resolve_model(str(tmp_path / "link")) == directory
    snapshot = tmp_path / "models--a--b" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--a--b" / "blobs").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "models--a--b" / "blobs" / name).write_text("{}")
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    assert resolve_model(str(snapshot)) == snapshot
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("../../../m/..data/config.json")
    with pytest.raises(UnsupportedModel, match="leads out"):
        resolve_model(str(snapshot))


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    directory = model_files(tmp_path / "m", {"model_type": "llama"})
    (directory / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/else"}')
    with pytest.raises(UnsupportedModel, match="merge it into its model first"):
        resolve_model(str(directory))


@pytest.mark.parametrize("missing", [True, False])
def test_missing_weights_are_refused(missing: bool, make_model: Callable[[Any], Path]) -> None:
    """Without the check, transformers would initialise them at random."""
    directory = make_model(transformers.LlamaConfig(**SMALL))
    weights = safetensors.torch.load_file(directory / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    taken = weights.pop(name)
    if not missing:
        weights[name] = taken[:-1].clone()
    safetensors.torch.save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=f"missing or of another shape: {name}$"):
        CausalModel.load(directory, dtype=torch.float32, device="cpu", threads=1)


def test_attention_that_is_not_ours_is_refused(make_model: Callable[[Any], Path]) -> None:
    directory = make_model(transformers.GptOssConfig(**SMALL, head_dim=16, num_local_experts=2))
    with pytest.raises(UnsupportedModel, match=r"s_aux"):
        CausalModel.load(directory, dtype=torch.float32, device="cpu")


def test_a_tokenizer_is_named_by_what_its_ids_stand_for(tmp_path: Path) -> None:
    def hash_of(content: dict[str, Any]) -> str:
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        return tokenizer_hash(tmp_path)

    plain = hash_of({"model": {"vocab": {"a": 0, "b": 1}}})
    assert len(plain) == 32
    assert hash_of({"model": {"vocab": {"b": 1, "a": 0}}, "added_tokens": []}) == plain
    assert hash_of({"model": {"vocab": [["a", 0.0], ["b", -1.5]]}}) == plain
    assert hash_of({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1, "content": "b"}]}) == plain
    assert hash_of({"model": {"vocab": {"a": 1, "b": 0}}}) != plain
    assert hash_of({"model": {"vocab": {"a": 0, "b": 1, "c": 2}}}) != plain


@pytest.mark.parametrize("content", [None, "{", "[]", '{"model": {}}', '{"model": {"vocab": 3}}'])
def test_no_tokenizer_is_a_clear_error(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(NoTokenizer, match=r"tokenizer\.json"):
        tokenizer_hash(tmp_path)


def test_end_tokens_come_from_the_generation_config(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SMALL, eos_token_id=[3, 4])
    assert eos_token_ids(tmp_path, config) == (3, 4)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert eos_token_ids(tmp_path, config) == (5,)


def test_dtypes_have_names() -> None:
    assert parse_dtype("float32", "cpu") == torch.float32
    assert parse_dtype("auto", "cpu") == default_dtype("cpu")
    with pytest.raises(UnsupportedModel, match="int8"):
        parse_dtype("int8", "cpu")


def test_a_truncated_model_keeps_the_named_layers(make_model: Callable[[Any], Path], tmp_path: Path) -> None:
    directory = make_model(transformers.LlamaConfig(**SMALL))
    out = truncate_model(directory, [0, 3], tmp_path / "shallow")
    model = CausalModel.load(out, dtype=torch.float32, device="cpu")
    assert model.info.tokenizer_hash == tokenizer_hash(directory)
    assert len(model.forward([Rows(model.new_cache(), [1, 2], 1)])) == 1
    assert load_config(out).num_hidden_layers == 2
    with pytest.raises(UnsupportedModel, match="layers: must be"):
        truncate_model(directory, [4], out)


def test_the_default_model_is_converted_once_by_two_callers(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    source = save_tiny_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(prepare, "_default_gguf", lambda: source)
    with ThreadPoolExecutor(2) as pool:
        directory, same = pool.map(resolve_model, [DEFAULT_MODEL] * 2)
    assert directory == same
    assert directory.name.startswith(f"{DEFAULT_MODEL}-")
    assert [path.name for path in (own_cache / "models").iterdir() if not path.name.startswith(".")] == [
        directory.name
    ]
    before = (directory / "model.safetensors").stat().st_mtime_ns
    assert prepare.main([]) == 0
    assert tuple(capfd.readouterr()) == (f"{directory}\n", "")
    assert (directory / "model.safetensors").stat().st_mtime_ns == before
    config = load_config(directory)
    assert (config.vocab_size, eos_token_ids(directory, config)) == (29, (1,))
    sampling = json.loads((directory / "generation_config.json").read_text())
    assert (sampling["temperature"], sampling["top_p"]) == (0.2, 0.9)


@pytest.mark.model
def test_the_default_model_brings_its_chat_template_and_end_token(
    default_model_dir: Path, default_model: CausalModel
) -> None:
    settings = json.loads((default_model_dir / "tokenizer_config.json").read_text())
    assert "<|im_start|>" in settings["chat_template"]
    assert "quantization_config" not in json.loads((default_model_dir / "config.json").read_text())
    assert default_model.info.eos_token_ids == (2,)
    assert default_model.info.context_window == 8192
    tokenizer = transformers.AutoTokenizer.from_pretrained(default_model_dir)
    assert tokenizer.decode(tokenizer.encode(" It is 12345 days.\n\n  ça")) == " It is 12345 days.\n\n  ça"


def test_the_command_names_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare.main(["/no/such.gguf"]) == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert "no such file" in error
