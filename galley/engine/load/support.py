"""Files of models: the cache directory, the models that are refused, and the weights of the others.

Only decoder-only models are served, with attention KV as their only sequence state. Weights must be
safetensors, which hold numbers only. A pickle can run code, so it is never opened.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from galley.common.models.files import MODEL_FILES, code_asked_for, foreign_file
from galley.core.errors import Unavailable, UnsupportedModel

_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
_PICKLED = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
_ADAPTER = "adapter_config.json"
_INDEX = "*.safetensors.index.json"
# Rotary embeddings that depend on the longest sequence of the step, so on other sessions.
_SHIFTING_ROPE = {"dynamic", "longrope"}
# Weights that an error names.
_NAMED = 3


def cache_dir() -> Path:
    """Return $GALLEY_CACHE_DIR, else $XDG_CACHE_HOME/galley, else ~/.cache/galley. It may not exist yet."""
    own = os.environ.get("GALLEY_CACHE_DIR")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "galley"


def file_digest(path: Path) -> str:
    """Return the blake2b-128 of the file's content, in hex.

    The digest is cached under path, size and modification time, so an unchanged file is read once.
    """
    path = path.resolve()
    stat = path.stat()
    key = hashlib.blake2b(f"{path}|{stat.st_size}|{stat.st_mtime_ns}".encode(), digest_size=16).hexdigest()
    note = cache_dir() / "digests" / key
    try:
        return note.read_text(encoding="ascii")
    except OSError:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=16)).hexdigest()
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        scratch = note.with_name(f"{key}.{os.getpid()}")
        scratch.write_text(digest, encoding="ascii")
        scratch.replace(note)
    except OSError:
        pass
    return digest


def refuse_raw_config(config: dict[str, Any]) -> None:
    """Raise UnsupportedModel, with the reason, for a config.json that is refused without transformers."""
    name = config.get("model_type") or "the model"
    if (reason := code_asked_for(config)) is not None:
        raise UnsupportedModel(f"{name}: {reason}")
    if config.get("transformers_weights"):
        raise UnsupportedModel(f"{name}: config.json must not set transformers_weights")
    if config.get("is_encoder_decoder"):
        raise UnsupportedModel(f"{name}: must be a decoder-only model, got an encoder-decoder")
    if config.get("text_config") or config.get("vision_config"):
        raise UnsupportedModel(
            f"{name}: must be a text-only language model, got a composite one (text_config or vision_config "
            "in config.json)"
        )
    if config.get("quantization_config"):
        raise UnsupportedModel(f"{name}: must not be quantized; use a safetensors model in float, or a GGUF")


def refuse_config(config: Any, model_class: Any) -> None:
    """Raise UnsupportedModel, with the reason, if a configuration or its class is not served."""
    refuse_raw_config(config.to_dict())
    name = config.model_type
    if model_class is None:
        raise UnsupportedModel(f"{name}: must be a causal language model that transformers knows")
    layers = set(getattr(config, "layer_types", None) or ())
    if getattr(model_class, "_is_stateful", False) or getattr(config, "layers_block_type", None):
        raise UnsupportedModel(f"{name}: must keep no recurrent state, which cannot be cut back to a prefix")
    if layers - _ATTENTION_LAYERS:
        raise UnsupportedModel(f"{name}: layers must be full or sliding attention, got {sorted(layers)}")
    if not getattr(model_class, "_supports_attention_backend", False):
        raise UnsupportedModel(f"{name}: attention must go through transformers' AttentionInterface")
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModel(f"{name}: layers must not share keys and values")
    _refuse_rope(name, getattr(config, "rope_parameters", None) or {})


def _refuse_rope(name: str, rope: dict[str, Any]) -> None:
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    kinds = {part.get("rope_type") for part in parts} & _SHIFTING_ROPE
    if kinds:
        raise UnsupportedModel(f"{name}: rope_type must not depend on other sequences, got {kinds.pop()!r}")


def is_pickled(path: Path) -> bool:
    return path.suffix in _PICKLED


def refuse_files(directory: Path) -> None:
    """Raise UnsupportedModel unless `directory` itself holds a config.json and safetensors weights."""
    if not (directory / "config.json").is_file():
        raise UnsupportedModel(f"{directory}: must hold config.json")
    if (reason := foreign_file(directory, MODEL_FILES)) is not None:
        raise UnsupportedModel(reason)
    if (directory / _ADAPTER).exists():
        raise UnsupportedModel(f"{directory}: must be no adapter ({_ADAPTER}); merge it into its model first")
    if not any(directory.glob("*.safetensors")):
        if pickles := sorted(path.name for path in directory.iterdir() if is_pickled(path)):
            raise UnsupportedModel(
                f"{directory}: weights must be safetensors, got {pickles[0]}; convert it (a pickle can run "
                "code, so it is never opened)"
            )
        raise UnsupportedModel(f"{directory}: must hold *.safetensors")
    for index in sorted(directory.glob(_INDEX)):
        _refuse_index(index)


def _refuse_index(index: Path) -> None:
    """Raise UnsupportedModel unless the index names safetensors files beside it."""
    try:
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UnsupportedModel(f"{index}: must be an index of weights, with a weight_map") from None
    for name in sorted(map(str, named)):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UnsupportedModel(f"{index}: must name safetensors files beside it, got {name!r}")
        if not (index.parent / name).is_file():
            raise UnsupportedModel(f"{index}: must name existing files, got {name!r}")


def check_readable(path: Path) -> None:
    """Raise UnsupportedModel unless this process may read the file `path`, Unavailable if the disk fails.

    safetensors reports every file that it cannot open as one that does not exist.
    """
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError as error:
        is_own = not isinstance(error, (FileNotFoundError, PermissionError, IsADirectoryError))
        kind = Unavailable if is_own else UnsupportedModel
        raise kind(f"{path}: cannot be read: {error.strerror}") from error


def read_weights(model_class: Any, directory: Path, **arguments: Any) -> Any:
    """Return a `model_class` (or what an auto class chooses) with the safetensors in `directory`.

    Raises UnsupportedModel if they cannot be read, or a weight has another shape or is missing: transformers
    would fill it with random numbers. Raises Unavailable if the disk fails.
    """
    for path in sorted(directory.glob("*.safetensors")):
        check_readable(path)
    try:
        module, report = model_class.from_pretrained(
            directory,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **arguments,
        )
    except (OSError, SafetensorError) as error:
        raise UnsupportedModel(f"{directory}: its weights cannot be read: {error}") from error
    mismatched = {name for name, *_ in report["mismatched_keys"]}
    refuse_weights(directory, sorted({*report["missing_keys"], *mismatched}))
    return module


def refuse_weights(directory: Path, wrong: Sequence[str]) -> None:
    if wrong:
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise UnsupportedModel(
            f"{directory}: must hold all weights in the shapes of config.json; missing or of another shape: "
            f"{', '.join(wrong[:_NAMED])}{more}"
        )
