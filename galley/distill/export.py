"""Write and read draft directories (galley/engine/load/draft_directory.py) for training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from galley.common.models.files import DRAFT_SECTION, tokenizer_hash
from galley.core.errors import InvalidField
from galley.distill.features.draft import FeatureDraft
from galley.distill.training.models import Llama, Target
from galley.distill.work import replacing, write_json
from galley.engine.cpu.int8 import quantized
from galley.engine.load.draft_directory import (
    FEATURE_LAYERS,
    FEATURES_FORMAT,
    FORMAT,
    HEAD_TOKENS,
    SCALE,
    TARGET,
    WEIGHTS,
)

S = TypeVar("S", bound=Llama)

SHARPENING = 1.25
NORM = "model.norm.weight"
# Weights of a layer whose results are added to the residual.
_OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
_COPIED = (
    "attention_dropout", "bos_token_id", "eos_token_id", "head_dim", "hidden_act", "hidden_size",
    "initializer_range", "intermediate_size", "max_position_embeddings", "num_attention_heads",
    "num_key_value_heads", "pad_token_id", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta",
)  # fmt: skip


def sharpened(student: Llama) -> Llama:
    """Return a copy with logits SHARPENING times as far apart; greedy draft tokens stay as they are.

    Draft and target sample with the same Gumbel noise (galley/core/noise.py). An overconfident draft then
    proposes the target's token more often than a calibrated one.
    """
    copy = Llama(student.shape, student.embedding, len(student.lm_head.weight))
    state = student.state_dict()
    copy.load_state_dict(state | {NORM: state[NORM] * SHARPENING})
    return copy


def as_stored(student: S) -> S:
    """Return a copy with the weights that `write_draft` stores."""
    copy = deepcopy(student, {id(student.embedding): student.embedding})
    state = student.state_dict()
    for name, weight in state.items():
        if weight.dim() > 1:
            rows, scale = quantized(weight)
            state[name] = rows.float() * scale[:, None]
    copy.load_state_dict(state)
    return copy


def write_draft(
    folder: Path,
    student: Llama,
    target: Target,
    heads: NDArray[np.int64],
    target_dir: Path,
    feature_layers: Sequence[int] = (),
) -> None:
    """Write config.json and model.safetensors of a student whose head's rows are the tokens `heads`.

    `feature_layers`: the draft reads the target's states after these numbers of layers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {HEAD_TOKENS: torch.from_numpy(heads).to(torch.int32)}
    for name, weight in student.state_dict().items():
        if weight.dim() == 1:
            tensors[name] = weight.float()
        else:
            tensors[name], tensors[name + SCALE] = quantized(weight)
    stored = {name: value.contiguous() for name, value in tensors.items()}
    with replacing(folder / WEIGHTS) as unfinished:
        try:
            save_file(stored, unfinished, {"format": "pt"})
        except SafetensorError as error:  # what it makes of a full disk, for example
            raise OSError(f"{folder / WEIGHTS}: cannot be written: {error}") from error
    copied = {name: target.config[name] for name in _COPIED if name in target.config}
    features = {FEATURE_LAYERS: list(feature_layers)} if feature_layers else {}
    config = copied | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": student.shape.layers,
        "vocab_size": target.vocab,
        "tie_word_embeddings": False,
        DRAFT_SECTION: {
            "format": FEATURES_FORMAT if feature_layers else FORMAT,
            "tokenizer_hash": tokenizer_hash(target_dir),
            "head_vocab": len(heads),
            "embeddings": TARGET,
            "embeddings_sha256": target.embedding_sha256(),
            **features,
        },
    }
    write_json(folder / "config.json", config)


def read_draft(folder: Path, target: Target, option: str) -> tuple[Llama, NDArray[np.int64]]:
    """Return the draft in `folder` and the tokens of its head. Raise InvalidField, naming `option`."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        section, stored = config[DRAFT_SECTION], load_file(folder / WEIGHTS)
        if section["embeddings"] == TARGET and section["embeddings_sha256"] != target.embedding_sha256():
            raise InvalidField(option, f"{folder}: must be trained for this target, not another")
        shape = replace(target.shape, layers=config["num_hidden_layers"], inner=config["intermediate_size"])
        heads = stored[HEAD_TOKENS].long()
        embedding = stored.get("model.embed_tokens.weight", target.embedding)
        after = section.get(FEATURE_LAYERS, ())
        draft = (
            FeatureDraft(shape, embedding, len(heads), after)
            if after
            else Llama(shape, embedding, len(heads))
        )
        draft.load_state_dict({name: _widened(name, stored) for name in draft.state_dict()})
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        problem = f"{folder}: must be a draft of this target, as galley distill writes it: {_reason(error)}"
        raise InvalidField(option, problem) from error
    return draft, heads.numpy()


def _reason(error: Exception) -> str:
    """Return why a draft cannot be read, in one line."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{Path(error.filename).name}: {error.strerror}"
    if isinstance(error, KeyError):
        return f"{error.args[0]} is missing"
    return str(error).partition("\n")[0]


def _widened(name: str, stored: dict[str, Tensor]) -> Tensor:
    scale = stored.get(name + SCALE)
    weight = stored[name].float()
    return weight if scale is None else weight * scale[:, None]


def begin_from(student: Llama, draft: Llama) -> None:
    """Give the student the draft's weights; layers that the draft lacks add nothing at first.

    Their outputs start at 0, as residual branches do in Fixup (Zhang et al., arXiv 1901.09321, section 3).
    Raise InvalidField if the draft does not fit.
    """
    weights = student.state_dict()
    for name, weight in draft.state_dict().items():
        if name not in weights or weights[name].shape != weight.shape:
            bound = f"must have at most {student.shape.layers} layers (--layers) and the target's shapes"
            raise InvalidField("start", f"{bound}, but {name} does not fit")
        weights[name] = weight / SHARPENING if name == NORM else weight
    for layer in range(draft.shape.layers, student.shape.layers):
        for output in _OUTPUTS:
            name = f"model.layers.{layer}.{output}"
            weights[name] = torch.zeros_like(weights[name])
    student.load_state_dict(weights)
