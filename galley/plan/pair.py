"""Judge whether a draft fits a target from their configurations and the headers of their weights.

No weight is read. One decoding step reads every weight of a model once but for the table of embeddings, of
which it needs a row, so a step is taken to last as long as its bytes. Row costs are taken to be flat, as on a
device that is bound by its memory's bandwidth: the gains are upper bounds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from galley.common.models.files import DRAFT_SECTION, NumberFormat, foreign_file, token_table, tokenizer_hash
from galley.core.cost.model import best_k, break_even_alpha, gain
from galley.core.errors import UnsupportedModel

ALPHAS = (0.5, 0.7, 0.9)
NUMBER_BYTES: Mapping[NumberFormat, int] = {"float32": 4, "bfloat16": 2}
_STORED_BYTES = {"I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1}
_READ = ("*.safetensors", "config.json", "tokenizer.json", "training.json")
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_NAMES_OF_GPT2 = {
    "num_attention_heads": "n_head",
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}
# The bound of the format itself.
_MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8


class Tensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """A model as its files describe it; the directory of a trained draft has no tokenizer.json."""

    name: str
    directory: Path
    config: Mapping[str, Any]
    tensors: tuple[Tensor, ...]

    @property
    def tokenizer_hash(self) -> str:
        """Return the hash of the tokenizer, for a trained draft the recorded one. Raises NoTokenizer."""
        section = self.config.get(DRAFT_SECTION)
        if isinstance(section, dict):
            return str(section.get("tokenizer_hash"))
        return tokenizer_hash(self.directory)

    @property
    def parameters(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    def weight_bytes(self, number_bytes: int) -> int:
        return sum(_bytes(tensor, number_bytes) for tensor in self.tensors)

    def step_bytes(self, number_bytes: int) -> int:
        """Return the bytes of weights that a step reads: the embeddings only where they are the head too."""
        has_head = any(tensor.name.endswith(_HEAD) for tensor in self.tensors)
        read = (one for one in self.tensors if not (has_head and one.name.endswith(_EMBEDDING)))
        return sum(_bytes(tensor, number_bytes) for tensor in read)

    def kv_bytes(self, number_bytes: int) -> int:
        """Return the bytes of KV of one token."""
        heads = self._integer("num_attention_heads")
        size = int(self.config.get("head_dim") or self._integer("hidden_size") // heads)
        kv_heads = int(self.config.get("num_key_value_heads") or heads)
        return 2 * self._integer("num_hidden_layers") * kv_heads * size * number_bytes

    @property
    def context(self) -> int:
        return self._integer("max_position_embeddings")

    def _integer(self, field: str) -> int:
        return int(self.config[field if field in self.config else _NAMES_OF_GPT2[field]])

    def measured_alpha(self) -> float | None:
        """Return the share of the target's likeliest tokens that a trained draft predicted in its training.

        None if its directory has no record of that.
        """
        try:
            record = json.loads((self.directory / "training.json").read_text(encoding="utf-8"))
            parts = [(int(one["tokens"]), float(one["greedy"])) for one in record["acceptance"].values()]
            share = sum(tokens * greedy for tokens, greedy in parts) / sum(tokens for tokens, _ in parts)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
            return None
        return share if 0 <= share <= 1 else None


def _bytes(tensor: Tensor, number_bytes: int) -> int:
    return math.prod(tensor.shape) * _STORED_BYTES.get(tensor.dtype, number_bytes)


def read_model(
    name: str,
    directory: Path,
    refuse_config: Callable[[dict[str, Any]], None],
    tensors: Iterable[Tensor] | None = None,
) -> Model:
    """Read config.json, and the headers of all *.safetensors unless `tensors` are given.

    `refuse_config` raises for a config.json that the engine does not serve. Raises UnsupportedModel for files
    that cannot be read.
    """
    if (reason := foreign_file(directory, _READ)) is not None:
        raise UnsupportedModel(reason)
    path = directory / "config.json"
    try:
        config = dict(json.loads(path.read_text(encoding="utf-8")))
        refuse_config(config)
        if tensors is None:
            tensors = [one for file in sorted(directory.glob("*.safetensors")) for one in _header(file)]
        model = Model(name, directory, config, tuple(tensors))
        _ = model.kv_bytes(1), model.context  # the fields that are needed later
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise UnsupportedModel(f"{directory}: config.json and weights must be readable: {error!r}") from error
    if not model.tensors:
        raise UnsupportedModel(f"{directory}: must hold *.safetensors")
    return model


def _header(path: Path) -> list[Tensor]:
    """Return the tensors in a header of safetensors. Raises ValueError, TypeError, KeyError or OSError."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"{path.name}: its header must be at most {_MAX_HEADER_BYTES} bytes")
        header = json.loads(file.read(length))
    return [
        Tensor(name, str(entry["dtype"]), tuple(map(int, entry["shape"])))
        for name, entry in header.items()
        if name != "__metadata__"
    ]


@dataclass(frozen=True, slots=True)
class Gain:
    alpha: float
    k: int
    gain: float


@dataclass(frozen=True, slots=True)
class Fit:
    """The needs and the gains of a pair. `problem` says why it does not fit; empty if it does.

    `expected` is the gain at the acceptance rate that the draft's training recorded; None without a record.
    """

    cost_ratio: float
    break_even_alpha: float | None
    gains: tuple[Gain, ...]
    expected: Gain | None
    needed_bytes: int
    problem: str


def judge(target: Model, draft: Model, dtype: NumberFormat, memory_bytes: int) -> Fit:
    """Judge a pair whose weights and KV of one whole context of the target are to fit into `memory_bytes`."""
    number_bytes = NUMBER_BYTES[dtype]
    ratio = target.step_bytes(number_bytes) / draft.step_bytes(number_bytes)
    kv = (target.kv_bytes(number_bytes) + draft.kv_bytes(number_bytes)) * target.context
    needed = target.weight_bytes(number_bytes) + draft.weight_bytes(number_bytes) + kv
    pays_from = break_even_alpha(ratio)
    problem = _other_tokenizer(target, draft)
    if not problem and needed > memory_bytes:
        problem = f"memory: the pair needs {_gib(needed)}, got {_gib(memory_bytes)}"
    if not problem and pays_from is None:
        problem = f"speed: a draft step costs {1 / ratio:.2f} of a target step, so no draft token can pay"
    measured = draft.measured_alpha()
    gains = tuple(_gain(alpha, ratio) for alpha in ALPHAS)
    expected = None if measured is None else _gain(measured, ratio)
    return Fit(ratio, pays_from, gains, expected, needed, problem)


def _gain(alpha: float, ratio: float) -> Gain:
    k = best_k(alpha, ratio)
    return Gain(alpha, k, gain(alpha, k, ratio))


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _other_tokenizer(target: Model, draft: Model) -> str:
    ours, theirs = target.tokenizer_hash, draft.tokenizer_hash
    if ours == theirs:
        return ""
    return f"tokenizers: must be the same, got {ours} and {theirs}{_first_difference(target, draft)}"


def _first_difference(target: Model, draft: Model) -> str:
    if DRAFT_SECTION in draft.config:
        return " (the draft was trained for another tokenizer)"
    tables = [token_table(model.directory / "tokenizer.json") for model in (target, draft)]
    ids = sorted(set().union(*tables))
    first = next((one for one in ids if tables[0].get(one) != tables[1].get(one)), None)
    texts = [repr(table[first]) if first in table else "no token" for table in tables]
    return f" ({len(tables[0]):,} and {len(tables[1]):,} tokens; token {first} is {texts[0]} and {texts[1]})"
