"""Convert a GGUF file to a plain model directory in float32.

`from_pretrained(gguf_file=...)` gives a model that cannot be saved again ("quantized with gguf"), so the
model is made from its configuration and filled with the unpacked tensors. transformers skips keys and tensors
that it does not know; what would change the model's outputs is read here, or refused.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from transformers import AutoConfig, AutoTokenizer, modeling_gguf_pytorch_utils
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from galley.core.errors import UnsupportedModel
from galley.engine.load.module import CAUSAL_LM, causal_class, silence
from galley.engine.load.support import refuse_config

_READER: Any = modeling_gguf_pytorch_utils
_ROPE: Any = ROPE_INIT_FUNCTIONS
_ROPE_FREQS = "rope_freqs.weight"
# Where a file does not name the base, llama.cpp takes this one.
_DEFAULT_BASE = 10_000.0
# Keys of rope.scaling that change nothing, or are read here.
_KNOWN_SCALING = frozenset({"type", "factor", "original_context_length", "finetuned"})
# The scaling of Llama 3.1 to 3.3, besides its factor. A file holds only the divisors that result.
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Rounding of the float32 divisors, relative.
_TOLERANCE = 1e-5
# Tensors that an error names.
_NAMED = 3
_REMEDY = "use the model's safetensors directory"


def convert(source: Path, out: Path) -> None:
    """Write the model in `source` to the existing directory `out`. Raises UnsupportedModel."""
    silence()
    config = _read_config(source)
    try:
        reader = GGUFReader(source)
        _set_rope(source, reader, config)
        refuse_config(config, causal_class(config))
        model = _build(source, reader, config)
    except (ValueError, KeyError, NotImplementedError) as error:  # of gguf, transformers or numpy
        raise _unreadable(source, error) from error
    model.save_pretrained(out)
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
        raise _unreadable(source, error) from error
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def _unreadable(source: Path, error: Exception) -> UnsupportedModel:
    return UnsupportedModel(f"{source}: must be a GGUF that transformers can read: {error}")


def _set_rope(source: Path, reader: Any, config: Any) -> None:
    """Set base and scaling of the rotary embedding as the file has them. Raises UnsupportedModel."""
    prefix = f"{_architecture(reader)}.rope."
    fields = {name: field.contents() for name, field in reader.fields.items() if name.startswith(prefix)}
    ropes = getattr(config, "rope_parameters", None) or {}
    rope = ropes.get("full_attention", ropes)
    is_plain = rope.get("rope_type") == "default"
    if is_plain:
        rope["rope_theta"] = fields.get(f"{prefix}freq_base", _DEFAULT_BASE)
    sliding = ropes.get("sliding_attention", rope)
    for key, part in ((f"{prefix}freq_base", rope), (f"{prefix}freq_base_swa", sliding)):
        base = part.get("rope_theta")
        if (value := fields.get(key, base)) != base:
            raise UnsupportedModel(f"{source}: {key}: must be {base}, got {value}; {_REMEDY}")
    scaling = _linear_scaling(source, fields, prefix)
    divisors = _divisors(reader)
    if divisors is not None:
        llama3 = _LLAMA3 | {"factor": float(divisors.max())}
        if not is_plain or rope is not ropes or scaling or not _fits(config, llama3, divisors):
            raise UnsupportedModel(f"{source}: {_ROPE_FREQS}: must be the scaling of Llama 3; {_REMEDY}")
        scaling = llama3
    if scaling and not is_plain:
        raise UnsupportedModel(f"{source}: {prefix}scaling: must be absent; {_REMEDY}")
    rope.update(scaling)


def _linear_scaling(source: Path, fields: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return linear scaling as rope_parameters, {} for none. Raises UnsupportedModel for another."""
    prefix, old = f"{prefix}scaling.", f"{prefix}scale_linear"
    factor = fields.get(f"{prefix}factor", fields.get(old)) or 1.0
    kind = fields.get(key := f"{prefix}type", "linear")  # llama.cpp's default
    if kind not in {"none", "linear"} and factor != 1:
        raise UnsupportedModel(f"{source}: {key}: must be none or linear, got {kind!r}; {_REMEDY}")
    for key in fields:
        if key.startswith(prefix) and key.removeprefix(prefix) not in _KNOWN_SCALING:
            raise UnsupportedModel(f"{source}: {key}: must be absent; {_REMEDY}")
    return {} if kind == "none" or factor == 1 else {"rope_type": "linear", "factor": factor}


def _divisors(reader: Any) -> Any:
    """Return by what each frequency is divided, float32 [frequencies]; None if by nothing."""
    for tensor in reader.tensors:
        if tensor.name == _ROPE_FREQS:
            divisors = dequantize(tensor.data, tensor.tensor_type)
            return None if (divisors == 1).all() else divisors
    return None


def _fits(config: Any, scaling: dict[str, Any], divisors: Any) -> bool:
    """Return True if `scaling` divides each frequency of the model by its divisor."""

    def frequencies(factor: float) -> Any:
        scaled = copy.deepcopy(config)
        scaled.rope_parameters |= scaling | {"factor": factor}
        return _ROPE["llama3"](scaled)[0].numpy()

    expected = frequencies(1.0) / frequencies(scaling["factor"])
    return divisors.shape == expected.shape and np.allclose(divisors, expected, rtol=_TOLERANCE, atol=0)


def _architecture(reader: Any) -> str:
    return str(reader.fields["general.architecture"].contents())


def _build(source: Path, reader: Any, config: Any) -> Any:
    model = CAUSAL_LM.from_config(config, dtype=torch.float32)
    _refuse_partial_rotation(source, reader, model)
    _refuse_tensors(source, reader, model)
    # Its progress bar cannot be switched off; errors are exceptions.
    with contextlib.redirect_stderr(io.StringIO()):
        content = _READER.load_gguf_checkpoint(
            str(source), return_tensors=True, model_to_load=model, torch_dtype=torch.float32
        )
    _refuse_shapes(source, content["tensors"], model)
    missing, unexpected = model.load_state_dict(content["tensors"], strict=False)
    model.tie_weights()
    tied = set(model._tied_weights_keys or ()) if config.tie_word_embeddings else set()  # noqa: SLF001  # no public name
    if unexpected or set(missing) - tied:
        raise UnsupportedModel(
            f"{source}: tensors must fit {config.model_type}: missing {missing}, unexpected {unexpected}"
        )
    return model


def _refuse_tensors(source: Path, reader: Any, model: Any) -> None:
    """Raise UnsupportedModel if the file has tensors that `model` lacks."""
    processor = _READER.TENSOR_PROCESSORS.get(_architecture(reader), _READER.TensorProcessor)()
    # The map has experts without the suffix.
    known = {_ROPE_FREQS, *_READER.get_gguf_hf_weights_map(model, processor)}
    names = [tensor.name for tensor in reader.tensors]
    if extra := [name for name in names if name not in known and name.removesuffix(".weight") not in known]:
        raise UnsupportedModel(
            f"{source}: tensors must be those of {model.config.model_type}, got {', '.join(extra[:_NAMED])}; "
            f"{_REMEDY}"
        )


def _refuse_partial_rotation(source: Path, reader: Any, model: Any) -> None:
    """Raise UnsupportedModel if the file rotates another part of each head than `model` does."""
    rotated = {2 * len(buffer) for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    architecture = _architecture(reader)
    for key in (f"{architecture}.rope.dimension_count", f"{architecture}.attention.key_length"):
        if key in reader.fields:
            sizes = set(np.atleast_1d(reader.fields[key].contents()).tolist())
            break
    else:  # llama.cpp's default: the whole head
        sizes = {model.config.hidden_size // model.config.num_attention_heads}
    if rotated and not sizes <= rotated:
        expected, got = (" or ".join(map(str, sorted(values))) for values in (rotated, sizes))
        raise UnsupportedModel(
            f"{source}: rotary embedding: must rotate {expected} values of each head, got {got}; {_REMEDY}"
        )


def _refuse_shapes(source: Path, tensors: dict[str, Any], model: Any) -> None:
    """Raise UnsupportedModel if a tensor has another shape than in `model`."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        if shape != expected.get(name, shape):
            raise UnsupportedModel(
                f"{source}: {name}: must have the shape {expected[name]}, got {shape}; {_REMEDY}"
            )


def _tidy(path: Path) -> None:
    """Drop the entries of tokenizer_config.json that only say how the tokenizer was loaded."""
    content = json.loads(path.read_text(encoding="utf-8"))
    for name in ("is_local", "local_files_only"):
        content.pop(name, None)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
