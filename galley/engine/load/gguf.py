"""Convert a GGUF file to a plain model directory in float32.

`from_pretrained(gguf_file=...)` gives a model that cannot be saved again ("quantized with gguf"), so the
model is made from its configuration and filled with the unpacked tensors.
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, modeling_gguf_pytorch_utils

from galley.core.errors import UnsupportedModel
from galley.engine.load.module import CAUSAL_LM, causal_class, silence
from galley.engine.load.support import refuse_config

_READER: Any = modeling_gguf_pytorch_utils


def convert(source: Path, out: Path) -> None:
    """Write the model in `source` to the existing directory `out`. Raises UnsupportedModel."""
    silence()
    config = _read_config(source)
    refuse_config(config, causal_class(config))
    _build(source, config).save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(  # nosec B615  # a directory
        source.parent, gguf_file=source.name, local_files_only=True, trust_remote_code=False
    )
    tokenizer.save_pretrained(out, save_jinja_files=False)
    for path in out.iterdir():
        path.chmod(0o644)
    _tidy(out / "tokenizer_config.json")


def _read_config(source: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(  # nosec B615  # a directory
            source.parent, gguf_file=source.name, local_files_only=True, trust_remote_code=False
        )
    except (ValueError, KeyError, OSError) as error:
        raise UnsupportedModel(f"{source}: must be a GGUF that transformers can read: {error}") from error
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def _build(source: Path, config: Any) -> Any:
    model = CAUSAL_LM.from_config(config, dtype=torch.float32)
    # Its progress bar cannot be switched off; errors are exceptions.
    with contextlib.redirect_stderr(io.StringIO()):
        content = _READER.load_gguf_checkpoint(
            str(source), return_tensors=True, model_to_load=model, torch_dtype=torch.float32
        )
    missing, unexpected = model.load_state_dict(content["tensors"], strict=False)
    model.tie_weights()
    tied = set(model._tied_weights_keys or ()) if config.tie_word_embeddings else set()  # noqa: SLF001  # no public name
    if unexpected or set(missing) - tied:
        raise UnsupportedModel(
            f"{source}: tensors must fit {config.model_type}: missing {missing}, unexpected {unexpected}"
        )
    return model


def _tidy(path: Path) -> None:
    """Drop the entries of tokenizer_config.json that only say how the tokenizer was loaded."""
    content = json.loads(path.read_text(encoding="utf-8"))
    for name in ("is_local", "local_files_only"):
        content.pop(name, None)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
