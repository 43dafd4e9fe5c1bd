"""A draft trained for its target: a Llama of few layers, whose head knows only some of the tokens.

Its directory, format 1: config.json of a LlamaForCausalLM, with one key more,

    "galley_draft": {"format": 1, "tokenizer_hash": ..., "head_vocab": N,
                     "embeddings": "target" or "own", "embeddings_sha256": ...}

and model.safetensors: the layers, the final norm, `lm_head.weight` [N, hidden], `galley.head_tokens` int32
[N] (what each row of the head stands for, rising) and, where they are its own, `model.embed_tokens.weight`.
Else the target's are taken, if they are those that it was trained with. A matrix may be int8 with a float32
scale for each row, `<name>.scale`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from galley.engine import attention
from galley.engine.cpu.int8 import Int8Linear
from galley.engine.errors import UnsupportedModel
from galley.engine.load.weights import refuse_weights

KEY = "galley_draft"
FORMAT = 1
WEIGHTS = "model.safetensors"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
HEAD_TOKENS = "galley.head_tokens"
SCALE = ".scale"
TARGET, OWN = "target", "own"

_HASHED_ROWS = 4096


@dataclass(frozen=True, slots=True)
class DraftFormat:
    """What config.json says under `galley_draft`. `embeddings_sha256` is None where they are its own."""

    tokenizer_hash: str
    head_vocab: int
    embeddings_sha256: str | None


def draft_format(config: Any) -> DraftFormat | None:
    """Of a transformers configuration; None if it is not a trained draft's.

    Raises UnsupportedModel for a format that is not served, or fields that do not fit together.
    """
    told = getattr(config, KEY, None)
    if told is None:
        return None
    if not isinstance(told, dict) or told.get("format") != FORMAT:
        found = told.get("format") if isinstance(told, dict) else told
        raise UnsupportedModel(f"{KEY}: format {FORMAT} is served, this is {found!r}")
    if config.model_type != "llama" or config.tie_word_embeddings:
        raise UnsupportedModel(f"{KEY}: must be a llama with tie_word_embeddings false")
    return DraftFormat(_hash(told, "tokenizer_hash"), _head_vocab(told, config.vocab_size), _embeddings(told))


def takes_embeddings(directory: Path) -> bool:
    """Does the draft in `directory`, if it is a trained one, need the embeddings of its target?"""
    told = json.loads((directory / "config.json").read_text(encoding="utf-8")).get(KEY)
    return isinstance(told, dict) and told.get("embeddings") == TARGET


def _head_vocab(told: Mapping[str, Any], vocab: int) -> int:
    count = told.get("head_vocab")
    if not isinstance(count, int) or not 1 <= count <= vocab:
        raise UnsupportedModel(f"{KEY}: head_vocab must be in [1, {vocab}], is {count!r}")
    return count


def _embeddings(told: Mapping[str, Any]) -> str | None:
    whose = told.get("embeddings")
    if whose not in {TARGET, OWN}:
        raise UnsupportedModel(f"{KEY}: embeddings must be {TARGET!r} or {OWN!r}, are {whose!r}")
    return _hash(told, "embeddings_sha256") if whose == TARGET else None


def _hash(told: Mapping[str, Any], name: str) -> str:
    value = told.get(name)
    if not isinstance(value, str) or not value:
        raise UnsupportedModel(f"{KEY}: {name} must be a hash, is {value!r}")
    return value


def load_draft(
    directory: Path,
    config: Any,
    form: DraftFormat,
    *,
    target: Path | None,
    dtype: torch.dtype,
    device: str,
) -> tuple[Any, Tensor]:
    """The draft in `directory` as a LlamaForCausalLM whose head is [head_vocab, hidden], and its tokens.

    `target` is the directory of the target's weights. int8 weights are widened to `dtype`; the tokens of the
    head are int64 [head_vocab], on `device`. Raises UnsupportedModel, naming what differs.
    """
    module = _empty(config, form)
    wanted = {name: list(weight.shape) for name, weight in module.state_dict().items()}
    if form.embeddings_sha256 is not None:
        del wanted[EMBEDDING]
    given, tokens = _read(directory, wanted, form, config.vocab_size)
    weights = {name: weight.to(dtype) for name, weight in _widened(given).items()}
    if form.embeddings_sha256 is not None:
        weights[EMBEDDING] = _target_embedding(target, form.embeddings_sha256, config).to(dtype)
    module.load_state_dict(weights, assign=True)
    _keep_int8(module, given)
    return module.to(device).eval(), tokens.to(device)


def _read(
    directory: Path, wanted: Mapping[str, list[int]], form: DraftFormat, vocab: int
) -> tuple[dict[str, Tensor], Tensor]:
    """The weights as stored, and the head's tokens; nothing is read that the header shows not to fit."""
    with _opened(directory / WEIGHTS) as file:
        names = set(file.keys())
        stored = file.get_tensor(HEAD_TOKENS) if HEAD_TOKENS in names else None
        tokens = _head_tokens(stored, form, vocab)
        slices = {name: file.get_slice(name) for name in names - {HEAD_TOKENS}}
        scales = {name + SCALE for name, one in slices.items() if one.get_dtype() == "I8"}
        shapes = {name: one.get_shape() for name, one in slices.items() if name not in scales}
        _refuse_other_weights(directory, wanted, shapes)
        return {name: file.get_tensor(name) for name in slices}, tokens


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file. Raises UnsupportedModel where it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise UnsupportedModel(f"{path}: cannot be read: {error}") from error


def _head_tokens(tokens: Tensor | None, form: DraftFormat, vocab: int) -> Tensor:
    if tokens is None or tokens.dtype != torch.int32 or tokens.shape != (form.head_vocab,):
        found = "missing" if tokens is None else f"{tokens.dtype} {list(tokens.shape)}"
        raise UnsupportedModel(f"{HEAD_TOKENS} must be int32 [{form.head_vocab}], is {found}")
    wide = tokens.long()
    if bool((wide.diff() <= 0).any()):
        raise UnsupportedModel(f"{HEAD_TOKENS} must rise from each token to the next")
    if wide[0] < 0 or wide[-1] >= vocab:
        raise UnsupportedModel(f"{HEAD_TOKENS} must lie in [0, {vocab}), go from {wide[0]} to {wide[-1]}")
    return wide


def _widened(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Float weights: int8 ones times their scales. A scale of nothing is left over, to be refused."""
    weights = {}
    scales = {name for name, weight in given.items() if weight.dtype == torch.int8}
    for name, weight in given.items():
        if name in scales:
            weights[name] = _scaled(name, weight, given.get(name + SCALE))
        elif name.removesuffix(SCALE) not in scales:
            weights[name] = weight
    return weights


def _scaled(name: str, weight: Tensor, scale: Tensor | None) -> Tensor:
    if weight.ndim != 2 or scale is None or scale.dtype != torch.float32 or scale.shape != weight.shape[:1]:
        raise UnsupportedModel(f"{name} is int8 without a float32 scale for each of its rows")
    return weight.float() * scale[:, None]


def _keep_int8(module: nn.Module, given: Mapping[str, Tensor]) -> None:
    """Let the linear layers of int8 weights know these, too."""
    for name, layer in list(module.named_modules()):
        weight = given.get(f"{name}.weight")
        biased = f"{name}.bias" in given
        if isinstance(layer, nn.Linear) and weight is not None and weight.dtype == torch.int8 and not biased:
            scale = given[f"{name}.weight{SCALE}"]
            module.set_submodule(name, Int8Linear(layer.weight.detach(), weight, scale))


def _target_embedding(target: Path | None, expected: str, config: Any) -> Tensor:
    """The target's embedding [vocab, hidden], if it is the one that the draft was trained with."""
    if target is None:
        raise UnsupportedModel("this draft takes its target's embeddings, and no target model is given")
    embedding = read_embedding(target)
    if embedding.shape != (config.vocab_size, config.hidden_size):
        raise UnsupportedModel(
            f"the draft needs embeddings [{config.vocab_size}, {config.hidden_size}], "
            f"the target's in {target} are {list(embedding.shape)}"
        )
    found = embeddings_sha256(embedding)
    if found != expected:
        raise UnsupportedModel(
            f"the draft was trained for another target: its embeddings' sha256 is {expected}, "
            f"that of {target} is {found}"
        )
    return embedding


def read_embedding(directory: Path) -> Tensor:
    """The embedding [vocab, hidden] of the model in `directory`.

    Raises UnsupportedModel if there is none, or a file is damaged.
    """
    for path in sorted(directory.glob("*.safetensors")):
        with _opened(path) as file:
            if EMBEDDING in file.keys():  # noqa: SIM118  # no dictionary
                embedding: Tensor = file.get_tensor(EMBEDDING)
                return embedding
    raise UnsupportedModel(f"{directory} holds no {EMBEDDING}")


def embeddings_sha256(embedding: Tensor) -> str:
    """The sha256, in hex, of an embedding as float32, little-endian, row after row."""
    digest = sha256()
    for first in range(0, len(embedding), _HASHED_ROWS):  # so that no second copy of all is made
        rows = embedding[first : first + _HASHED_ROWS].float().numpy()
        digest.update(rows.astype("<f4", copy=False).tobytes())
    return digest.hexdigest()


def _empty(config: Any, form: DraftFormat) -> Any:
    """The module without memory for its weights."""
    llama: Any = transformers.LlamaForCausalLM
    with torch.device("meta"):
        module = llama._from_config(config, attn_implementation=attention.NAME)  # noqa: SLF001
        module.lm_head = nn.Linear(config.hidden_size, form.head_vocab, bias=False)
    module.model.rotary_emb = type(module.model.rotary_emb)(config)
    return module


def _refuse_other_weights(
    directory: Path, wanted: Mapping[str, list[int]], given: Mapping[str, list[int]]
) -> None:
    fitting = {name for name in wanted if wanted[name] == given.get(name)}
    refuse_weights(directory, sorted(wanted.keys() - fitting))
    if unknown := sorted(given.keys() - wanted.keys()):
        raise UnsupportedModel(f"{directory}: a draft has no weights called {', '.join(unknown)}")


class ReducedHead:
    """Spreads the logits of some tokens over the whole vocabulary; the others are never drawn."""

    def __init__(self, tokens: Tensor, vocab_size: int) -> None:
        self.tokens = tokens
        # The same in memory of the CPU: what each column stands for.
        self.columns = tokens.cpu().numpy()
        self._vocab_size = vocab_size

    def spread(self, logits: Tensor) -> Tensor:
        """[rows, vocab_size] of [rows, head_vocab]: minus infinity for tokens outside the head."""
        rows = len(logits)
        whole = logits.new_full((rows, self._vocab_size), -torch.inf)
        return whole.scatter_(1, self.tokens.expand(rows, -1), logits)
