"""Which models this engine serves: decoder-only ones whose only sequence state is attention KV."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from services.common.model_files import refuse_strays
from services.engine.errors import UnsupportedModel

if TYPE_CHECKING:
    from pathlib import Path

_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
# Rotary embeddings that depend on the longest sequence of the pass: a session would feel its company.
_SHIFTING_ROPE = {"dynamic", "longrope"}


def refuse_raw_config(config: dict[str, Any]) -> None:
    """Raise UnsupportedModel, naming the reason, for a config.json that needs no closer look."""
    name = config.get("model_type") or "the model"
    if config.get("auto_map"):
        raise UnsupportedModel(f"{name}: needs code from its repository (auto_map), which is never run")
    if config.get("is_encoder_decoder"):
        raise UnsupportedModel(f"{name}: is an encoder-decoder model; only decoder-only models are served")
    if config.get("text_config") or config.get("vision_config"):
        raise UnsupportedModel(f"{name}: is made of several models; only plain language models are served")
    if config.get("quantization_config"):
        raise UnsupportedModel(f"{name}: is quantized; give a safetensors model in float, or a GGUF")


def refuse_config(config: Any, model_class: Any) -> None:
    """Raise UnsupportedModel for a configuration, or a model class, with other sequence state than KV."""
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
        raise UnsupportedModel(
            f"{name}: its {kinds.pop()} rotary embedding depends on the company in a batch"
        )


def refuse_files(directory: Path) -> None:
    """Raise UnsupportedModel unless `directory` holds a config.json and safetensors weights; or StrayFile."""
    if not (directory / "config.json").is_file():
        raise UnsupportedModel(f"{directory} holds no config.json")
    refuse_strays(directory)
    if any(directory.glob("*.safetensors")):
        return
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
    if pickles:
        raise UnsupportedModel(
            f"{directory} holds only pickled weights ({pickles[0]}); safetensors are needed"
        )
    raise UnsupportedModel(f"{directory} holds no *.safetensors")
