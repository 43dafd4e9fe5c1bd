"""A draft trained for its target: a Llama of few layers whose head knows only some of the tokens.

Format 1 of its directory: config.json of a LlamaForCausalLM with one more key,

    "galley_draft": {"format": 1, "tokenizer_hash": ..., "head_vocab": N,
                     "embeddings": "target" or "own", "embeddings_sha256": ...}

and model.safetensors: the layers, the final norm, `lm_head.weight` [N, hidden], `galley.head_tokens` int32
[N] (the rising token ids of the head's rows) and, with its own embeddings, `model.embed_tokens.weight`.
Otherwise it uses the target's embeddings, if they are those it was trained with. A matrix may be int8 with a
float32 scale for each row, `<name>.scale`.

Format 2 is a draft that also reads the target's states (galley/distill/features/draft.py). Its section has
`feature_layers`, its weights `features.weight` [hidden, layers * hidden], `own.weight` [hidden, hidden], and
`features_scale` and `own_scale` for their inputs.
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

from galley.common.models.files import DRAFT_SECTION as KEY
from galley.core.errors import Unavailable, UnsupportedModel
from galley.core.features import MAX_FEATURE_LAYERS
from galley.engine import attention
from galley.engine.cpu.int8 import Int8Linear
from galley.engine.load.feature_head import FeatureHead, head_shapes
from galley.engine.load.support import check_readable, refuse_weights

FORMAT, FEATURES_FORMAT = 1, 2
MAX_LAYERS = 64
WEIGHTS = "model.safetensors"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
HEAD_TOKENS = "galley.head_tokens"
SCALE = ".scale"
FEATURE_LAYERS = "feature_layers"
TARGET, OWN = "target", "own"

_HASHED_ROWS = 4096


@dataclass(frozen=True, slots=True)
class DraftFormat:
    """The `galley_draft` section of config.json. `embeddings_sha256` is None for own embeddings.

    The draft reads its target's states after `feature_layers`.
    """

    tokenizer_hash: str
    head_vocab: int
    embeddings_sha256: str | None
    feature_layers: tuple[int, ...] = ()


def draft_format(config: Any) -> DraftFormat | None:
    """Return the draft section of a transformers configuration; None if it is not a trained draft's.

    Raises UnsupportedModel for a format that is not served, or fields that do not fit together.
    """
    section = getattr(config, KEY, None)
    if section is None:
        return None
    if not isinstance(section, dict) or section.get("format") not in (FORMAT, FEATURES_FORMAT):
        got = section.get("format") if isinstance(section, dict) else section
        raise UnsupportedModel(f"{KEY}: format must be {FORMAT} or {FEATURES_FORMAT}, got {got!r}")
    if config.model_type != "llama" or config.tie_word_embeddings:
        raise UnsupportedModel(f"{KEY}: must be a llama with tie_word_embeddings false")
    layers = config.num_hidden_layers
    if not isinstance(layers, int) or not 1 <= layers <= MAX_LAYERS:
        raise UnsupportedModel(f"num_hidden_layers: must be in [1, {MAX_LAYERS}], got {layers!r}")
    head_vocab, embeddings = section.get("head_vocab"), section.get("embeddings")
    if not isinstance(head_vocab, int) or not 1 <= head_vocab <= config.vocab_size:
        raise UnsupportedModel(f"{KEY}: head_vocab must be in [1, {config.vocab_size}], got {head_vocab!r}")
    if embeddings not in (TARGET, OWN):
        raise UnsupportedModel(f"{KEY}: embeddings must be {TARGET!r} or {OWN!r}, got {embeddings!r}")
    sha256_hex = _hash(section, "embeddings_sha256") if embeddings == TARGET else None
    read = _feature_layers(section) if section["format"] == FEATURES_FORMAT else ()
    return DraftFormat(_hash(section, "tokenizer_hash"), head_vocab, sha256_hex, read)


def takes_embeddings(directory: Path) -> bool:
    """Return True if `directory` holds a trained draft that uses its target's embeddings."""
    section = json.loads((directory / "config.json").read_text(encoding="utf-8")).get(KEY)
    return isinstance(section, dict) and section.get("embeddings") == TARGET


def _hash(section: Mapping[str, Any], name: str) -> str:
    value = section.get(name)
    if not isinstance(value, str) or not value:
        raise UnsupportedModel(f"{KEY}: {name} must be a hash, got {value!r}")
    return value


def _feature_layers(section: Mapping[str, Any]) -> tuple[int, ...]:
    layers = section.get(FEATURE_LAYERS)
    if (
        not isinstance(layers, list)
        or not all(isinstance(layer, int) and layer > 0 for layer in layers)
        or sorted(set(layers)) != layers
        or not 1 <= len(layers) <= MAX_FEATURE_LAYERS
    ):
        bound = f"must be 1 to {MAX_FEATURE_LAYERS} rising numbers of layers"
        raise UnsupportedModel(f"{KEY}: {FEATURE_LAYERS} {bound}, got {layers!r}")
    return tuple(layers)


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft as a LlamaForCausalLM, the tokens of its head's rows, and its projections of states, if any.

    The head is [head_vocab, hidden], its tokens int64 [head_vocab].
    """

    module: Any
    tokens: Tensor
    features: FeatureHead | None


def load_draft(
    directory: Path,
    config: Any,
    form: DraftFormat,
    *,
    target: Path | None,
    dtype: torch.dtype,
    device: str,
) -> LoadedDraft:
    """Return the draft in `directory`, on `device`.

    int8 weights are widened to `dtype`. `target` is the directory of the target's weights. Raises
    UnsupportedModel, or Unavailable if the disk fails.
    """
    module = _empty(config, form)
    expected_shapes = {name: list(weight.shape) for name, weight in module.state_dict().items()}
    if form.embeddings_sha256 is not None:
        del expected_shapes[EMBEDDING]
    of_features = head_shapes(config.hidden_size, len(form.feature_layers)) if form.feature_layers else {}
    given, tokens = _read(directory, expected_shapes | of_features, form, config.vocab_size)
    widened = _widened(given)
    of_states = {name: widened.pop(name).to(device) for name in of_features}
    weights = {name: weight.to(dtype) for name, weight in widened.items()}
    if form.embeddings_sha256 is not None:
        weights[EMBEDDING] = _target_embedding(target, form.embeddings_sha256, config).to(dtype)
    module.load_state_dict(weights, assign=True)
    _keep_int8(module, given)
    features = None
    if of_states:
        projections = {
            name: _linear(name, weight, given) for name, weight in of_states.items() if weight.ndim > 1
        }
        features = FeatureHead(form.feature_layers, projections, of_states, config, dtype)
    return LoadedDraft(module.to(device).eval(), tokens.to(device), features)


def _read(
    directory: Path, expected_shapes: Mapping[str, list[int]], form: DraftFormat, vocab: int
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the stored weights and the head's tokens; reads no weight before the header's shapes fit."""
    with _opened(directory / WEIGHTS) as file:
        names = set(file.keys())
        stored = file.get_tensor(HEAD_TOKENS) if HEAD_TOKENS in names else None
        tokens = _head_tokens(stored, form, vocab)
        slices = {name: file.get_slice(name) for name in names - {HEAD_TOKENS}}
        scales = {name + SCALE for name, one in slices.items() if one.get_dtype() == "I8"}
        shapes = {name: one.get_shape() for name, one in slices.items() if name not in scales}
        _refuse_other_weights(directory, expected_shapes, shapes)
        return {name: file.get_tensor(name) for name in slices}, tokens


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    check_readable(path)
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except OSError as error:  # no memory to map it, for example
        raise Unavailable(f"{path}: cannot be read: {error}") from error
    except SafetensorError as error:
        raise UnsupportedModel(f"{path}: cannot be read: {error}") from error


def _head_tokens(tokens: Tensor | None, form: DraftFormat, vocab: int) -> Tensor:
    if tokens is None or tokens.dtype != torch.int32 or tokens.shape != (form.head_vocab,):
        got = "nothing" if tokens is None else f"{tokens.dtype} {list(tokens.shape)}"
        raise UnsupportedModel(f"{HEAD_TOKENS}: must be int32 [{form.head_vocab}], got {got}")
    wide = tokens.long()
    if bool((wide.diff() <= 0).any()):
        raise UnsupportedModel(f"{HEAD_TOKENS}: must be strictly rising")
    if wide[0] < 0 or wide[-1] >= vocab:
        raise UnsupportedModel(f"{HEAD_TOKENS}: must be in [0, {vocab}), got {wide[0]} to {wide[-1]}")
    return wide


def _widened(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return float weights, int8 ones times their scales; keep a scale without weight, to be refused."""
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
        raise UnsupportedModel(f"{name}: int8 weights must have a float32 scale for each row")
    return weight.float() * scale[:, None]


def _linear(name: str, weight: Tensor, given: Mapping[str, Tensor]) -> nn.Linear:
    """Return a layer of the widened `weight`, which also keeps it as int8 if it is stored so."""
    if given[name].dtype == torch.int8:
        return Int8Linear(weight, given[name], given[name + SCALE])
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def _keep_int8(module: nn.Module, given: Mapping[str, Tensor]) -> None:
    """Replace linear layers that are stored as int8 by ones that also keep the int8 weights."""
    for name, layer in list(module.named_modules()):
        weight = given.get(f"{name}.weight")
        biased = f"{name}.bias" in given
        if isinstance(layer, nn.Linear) and weight is not None and weight.dtype == torch.int8 and not biased:
            scale = given[f"{name}.weight{SCALE}"]
            module.set_submodule(name, Int8Linear(layer.weight.detach(), weight, scale))


def _target_embedding(target: Path | None, expected: str, config: Any) -> Tensor:
    """Return the target's embedding [vocab, hidden]. Raises UnsupportedModel if the draft needs another."""
    if target is None:
        raise UnsupportedModel("target_model: must be set for a draft that uses its target's embeddings")
    embedding = read_embedding(target)
    if embedding.shape != (config.vocab_size, config.hidden_size):
        raise UnsupportedModel(
            f"target_model: embeddings must be [{config.vocab_size}, {config.hidden_size}] for this draft, "
            f"got {list(embedding.shape)} in {target}"
        )
    digest = embeddings_sha256(embedding)
    if digest != expected:
        raise UnsupportedModel(
            f"target_model: must be the target of this draft (sha256 of its embeddings: {expected}), "
            f"got {target} ({digest})"
        )
    return embedding


def read_embedding(directory: Path) -> Tensor:
    """Return the embedding [vocab, hidden] in `directory`. Raises UnsupportedModel if there is none.

    Raises Unavailable if the disk fails.
    """
    for path in sorted(directory.glob("*.safetensors")):
        with _opened(path) as file:
            if EMBEDDING in file.keys():  # noqa: SIM118  # not a dict
                embedding: Tensor = file.get_tensor(EMBEDDING)
                return embedding
    raise UnsupportedModel(f"{directory}: must hold {EMBEDDING}")


def embeddings_sha256(embedding: Tensor) -> str:
    """Return the sha256, in hex, of an embedding as float32, little-endian, row after row."""
    digest = sha256()
    for first in range(0, len(embedding), _HASHED_ROWS):  # without a second copy of the whole
        rows = embedding[first : first + _HASHED_ROWS].float().numpy()
        digest.update(rows.astype("<f4", copy=False).tobytes())
    return digest.hexdigest()


def _empty(config: Any, form: DraftFormat) -> Any:
    llama: Any = transformers.LlamaForCausalLM
    with torch.device("meta"):
        module = llama._from_config(config, attn_implementation=attention.NAME)  # noqa: SLF001
        module.lm_head = nn.Linear(config.hidden_size, form.head_vocab, bias=False)
    module.model.rotary_emb = type(module.model.rotary_emb)(config)
    return module


def _refuse_other_weights(
    directory: Path, expected_shapes: Mapping[str, list[int]], given: Mapping[str, list[int]]
) -> None:
    fitting = {name for name in expected_shapes if expected_shapes[name] == given.get(name)}
    refuse_weights(directory, sorted(expected_shapes.keys() - fitting))
    if unknown := sorted(given.keys() - expected_shapes.keys()):
        raise UnsupportedModel(f"{directory}: must not hold the weights {', '.join(unknown)}")


class ReducedHead:
    """A head that computes logits of some tokens; the others are never sampled."""

    def __init__(self, tokens: Tensor, vocab_size: int) -> None:
        self.tokens = tokens
        # The token ids of the columns, in the CPU's memory.
        self.columns = tokens.cpu().numpy()
        self._vocab_size = vocab_size

    def spread(self, logits: Tensor) -> Tensor:
        """Return logits [rows, vocab_size] from [rows, head_vocab]: minus infinity outside the head."""
        rows = len(logits)
        whole = logits.new_full((rows, self._vocab_size), -torch.inf)
        return whole.scatter_(1, self.tokens.expand(rows, -1), logits)
