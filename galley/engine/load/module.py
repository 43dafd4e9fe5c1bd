"""Load a model's weights with transformers and our attention; refuse everything that is not served."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from galley.common.models.files import NumberFormat, tokenizer_hash
from galley.core.errors import UnsupportedModel
from galley.engine import attention
from galley.engine.cpu import packing
from galley.engine.load.draft_directory import ReducedHead, draft_format, load_draft
from galley.engine.load.feature_head import FeatureHead
from galley.engine.load.support import read_weights, refuse_config, refuse_files
from galley.engine.parallel import sharding
from galley.engine.parallel.ranks import ALONE, Ranks

# transformers' annotations are not accurate.
CAUSAL_LM: Any = AutoModelForCausalLM
_LOGGING: Any = transformers_logging

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in get_args(NumberFormat)}


def default_dtype(device: str) -> torch.dtype:
    """Return bfloat16, or float32 on a CPU without a fast product of bfloat16 weights."""
    fast = torch.device(device).type != "cpu" or packing.kind(torch.bfloat16, device) != "torch"
    return torch.bfloat16 if fast else torch.float32


def parse_dtype(name: str, device: str) -> torch.dtype:
    """Return the dtype of a name in DTYPES, or of "auto". Raises UnsupportedModel for another."""
    if name == "auto":
        return default_dtype(device)
    if name not in DTYPES:
        raise UnsupportedModel(f"dtype: must be auto or one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def load_config(directory: Path) -> Any:
    """Return the transformers configuration of a servable model. Raises UnsupportedModel."""
    refuse_files(directory)
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)  # nosec B615  # a directory
    except (ValueError, KeyError, TypeError, ArithmeticError, OSError) as error:
        raise UnsupportedModel(f"{directory}: must be a model that transformers knows: {error}") from error
    refuse_config(config, causal_class(config))
    return config


def causal_class(config: Any) -> Any:
    mapping = CAUSAL_LM._model_mapping  # noqa: SLF001  # there is no public way to ask
    return mapping.get(type(config), None)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A module in evaluation mode; `head` is set if it gives the logits of some tokens only.

    `features` is set for a draft that reads states.
    """

    module: Any
    tokenizer_hash: str
    head: ReducedHead | None = None
    features: FeatureHead | None = None


def load_module(
    directory: Path,
    config: Any,
    *,
    dtype: torch.dtype,
    device: str,
    ranks: Ranks = ALONE,
    target: Path | None = None,
) -> Loaded:
    """Load the model, or this rank's shard of it, onto `device`, from safetensors only.

    `target` is the directory whose embeddings a trained draft uses. Raises UnsupportedModel if a weight is
    missing or has another shape.
    """
    silence()
    attention.register()
    form = draft_format(config)
    if form is not None:
        if ranks.size > 1:
            raise UnsupportedModel(f"{directory}: a trained draft must run on one rank, got {ranks.size}")
        draft = load_draft(directory, config, form, target=target, dtype=dtype, device=device)
        head = ReducedHead(draft.tokens, config.vocab_size)
        return Loaded(draft.module, form.tokenizer_hash, head, draft.features)
    if ranks.size > 1:
        module = sharding.load_shard(
            directory, config, dtype=dtype, device=device, attention=attention.NAME, ranks=ranks
        )
        sharding.join_ranks(module, ranks)
    else:
        kind = attention.NAME
        module = read_weights(CAUSAL_LM, directory, config=config, dtype=dtype, attn_implementation=kind)
        module = module.to(device).eval()
    return Loaded(module, tokenizer_hash(directory))


def silence() -> None:
    _LOGGING.set_verbosity_error()
    _LOGGING.disable_progress_bar()


def eos_token_ids(directory: Path, config: Any) -> tuple[int, ...]:
    """Return the model's end tokens, from generation_config.json, else from config.json, else none."""
    ids = None
    if (directory / "generation_config.json").is_file():
        ids = GenerationConfig.from_pretrained(directory, local_files_only=True).eos_token_id  # nosec B615  # a directory
    if ids is None:
        ids = getattr(config, "eos_token_id", None)
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)
