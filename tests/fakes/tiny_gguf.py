"""Write a tiny GGUF with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import gguf
import numpy as np
from numpy.typing import NDArray

SIZE = 32
HEADS = 2
_INNER = 48
_TOKENS = ["<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz", "ab"]
_Shapes: TypeAlias = dict[str, tuple[int, ...]]
_LINEAR: _Shapes = {
    "attn_q": (SIZE, SIZE),
    "attn_k": (SIZE, SIZE),
    "attn_v": (SIZE, SIZE),
    "attn_output": (SIZE, SIZE),
    "ffn_up": (_INNER, SIZE),
    "ffn_down": (SIZE, _INNER),
}
_GATE: _Shapes = {"ffn_gate": (_INNER, SIZE)}
_NORMS: _Shapes = {"attn_norm": (SIZE,), "ffn_norm": (SIZE,)}
_GEMMA_NORMS: _Shapes = {
    "attn_q_norm": (SIZE // HEADS,),
    "attn_k_norm": (SIZE // HEADS,),
    "post_attention_norm": (SIZE,),
    "post_ffw_norm": (SIZE,),
}
_BLOCKS: dict[str, _Shapes] = {
    "llama": _LINEAR | _GATE | _NORMS,
    "gemma3": _LINEAR | _GATE | _NORMS | _GEMMA_NORMS,
    "starcoder2": _LINEAR | _NORMS,
}


def save_tiny_gguf(
    path: Path,
    architecture: str = "llama",
    keys: Mapping[str, str | float] | None = None,
    tensors: Mapping[str, NDArray[Any]] | None = None,
    rotated: int = SIZE // HEADS,
) -> Path:
    """Write a model of one block to `path`, with further keys (below `architecture`) and tensors.

    `rotated` values of each head are rotated by their position.
    """
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(SIZE)
    writer.add_block_count(1)
    writer.add_feed_forward_length(_INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_layer_norm_eps(1e-5)
    writer.add_key_length(SIZE // HEADS)
    writer.add_rope_dimension_count(rotated)
    for key, value in (keys or {}).items():
        name = f"{architecture}.{key}"
        if isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_float32(name, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(_TOKENS)
    writer.add_token_merges(["a b"])
    writer.add_token_types([3, 3, *[1] * 27])
    writer.add_token_scores([0.0] * len(_TOKENS))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, values in (_weights(architecture) | dict(tensors or {})).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _weights(architecture: str) -> dict[str, NDArray[np.float32]]:
    generator = np.random.default_rng(1)
    shapes: _Shapes = {
        "token_embd": (len(_TOKENS), SIZE),
        "output": (len(_TOKENS), SIZE),
        "output_norm": (SIZE,),
    }
    shapes |= {f"blk.0.{name}": shape for name, shape in _BLOCKS[architecture].items()}
    parts = {f"{name}.weight": shape for name, shape in shapes.items()}
    if architecture == "starcoder2":
        biased = {name: shape for name, shape in shapes.items() if name not in {"token_embd", "output"}}
        parts |= {f"{name}.bias": shape[:1] for name, shape in biased.items()}
    return {name: generator.normal(size=shape).astype(np.float32) for name, shape in parts.items()}
