"""Files of models: the cache directory, the models that are refused, and the weights of the others.

Served are decoder-only models whose only sequence state is attention KV. Weights must be safetensors, which
hold numbers only. A pickle is a program and is never opened.
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

from galley.common.models.files import code_asked_for, foreign_file
from galley.core.errors import UnsupportedModel

_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
# Files of a model's directory that are read.
MODEL_FILES = ("*.safetensors", "*.json", "tokenizer*", "*.model", "*.jinja", "merges.txt", "vocab.txt")
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

    Kept in the cache directory under path, size and modification time, so that a second start reads less.
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
        raise UnsupportedModel(f"{name}: must not name the file to load (transformers_weights)")
    if config.get("is_encoder_decoder"):
        raise UnsupportedModel(f"{name}: is an encoder-decoder model; only decoder-only models are served")
    if config.get("text_config") or config.get("vision_config"):
        raise UnsupportedModel(f"{name}: consists of several models; only plain language models are served")
    if config.get("quantization_config"):
        raise UnsupportedModel(f"{name}: is quantized; give a safetensors model in float, or a GGUF")


def refuse_config(config: Any, model_class: Any) -> None:
    """Raise UnsupportedModel if a configuration or its class has other sequence state than KV."""
    refuse_raw_config(config.to_dict())
    name = config.model_type
    if model_class is None:
        raise UnsupportedModel(f"{name}: transformers knows no causal language model of this type")
    layers = set(getattr(config, "layer_types", None) or ())
    if getattr(model_class, "_is_stateful", False) or getattr(config, "layers_block_type", None):
        raise UnsupportedModel(f"{name}: keeps a recurrent state, which cannot be cut back to a prefix")
    if layers - _ATTENTION_LAYERS:
        raise UnsupportedModel(f"{name}: has layers of type {', '.join(sorted(layers - _ATTENTION_LAYERS))}")
    if not getattr(model_class, "_supports_attention_backend", False):
        raise UnsupportedModel(f"{name}: its attention does not go through transformers' AttentionInterface")
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModel(f"{name}: shares keys and values between layers")
    _refuse_rope(name, getattr(config, "rope_parameters", None) or {})


def _refuse_rope(name: str, rope: dict[str, Any]) -> None:
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    kinds = {part.get("rope_type") for part in parts} & _SHIFTING_ROPE
    if kinds:
        raise UnsupportedModel(f"{name}: its {kinds.pop()} rotary embedding depends on the rest of the batch")


def is_pickled(path: Path) -> bool:
    return path.suffix in _PICKLED


def refuse_files(directory: Path) -> None:
    """Raise UnsupportedModel unless `directory` itself holds a config.json and safetensors weights."""
    if not (directory / "config.json").is_file():
        raise UnsupportedModel(f"{directory}: must hold config.json")
    if (reason := foreign_file(directory, MODEL_FILES)) is not None:
        raise UnsupportedModel(reason)
    if (directory / _ADAPTER).exists():
        raise UnsupportedModel(f"{directory}: holds an adapter ({_ADAPTER}); merge it into its model first")
    if not any(directory.glob("*.safetensors")):
        if pickles := sorted(path.name for path in directory.iterdir() if is_pickled(path)):
            raise UnsupportedModel(
                f"{directory}: holds only pickled weights ({pickles[0]}), which are programs and never "
                "opened; convert them to safetensors"
            )
        raise UnsupportedModel(f"{directory}: must hold *.safetensors")
    for index in sorted(directory.glob(_INDEX)):
        _refuse_index(index)


def _refuse_index(index: Path) -> None:
    """Raise UnsupportedModel unless the index names safetensors files beside it."""
    try:
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UnsupportedModel(f"{index}: must be an index of weights") from None
    for name in sorted(map(str, named)):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UnsupportedModel(f"{index}: must name safetensors files beside it, got {name!r}")
        if not (index.parent / name).is_file():
            raise UnsupportedModel(f"{index}: {name!r} does not exist")


def read_weights(model_class: Any, directory: Path, **arguments: Any) -> Any:
    """Load a transformers class (or auto class) from the safetensors in `directory`.

    Raises UnsupportedModel if a weight is missing, which transformers would fill with random numbers, or has
    another shape.
    """
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
            f"{directory}: weights are missing or do not have the shape of config.json: "
            f"{', '.join(wrong[:_NAMED])}{more}"
        )
