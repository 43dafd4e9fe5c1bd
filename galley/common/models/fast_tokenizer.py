"""Load the tokenizer of a model's directory, as gateways and the grammars of replicas both read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

CONFIG = "tokenizer_config.json"


def load_fast_tokenizer(directory: Path, config: dict[str, Any]) -> FastTokenizer:
    """Return the tokenizer of tokenizer.json, with the control tokens that only `config` names.

    `config` is that of tokenizer_config.json.

    It neither truncates nor pads. Raise FileNotFoundError if there is no tokenizer.json, and ValueError if
    one of the files is broken.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{directory}: must hold the tokenizer.json of a fast tokenizer")
    try:
        fast = FastTokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(f"{path}: must be a tokenizer: {error}") from error
    fast.no_truncation()
    fast.no_padding()
    try:
        _add_missing_tokens(fast, config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        problem = f"added_tokens_decoder must map token ids to tokens, got {error!r}"
        raise ValueError(f"{directory / CONFIG}: {problem}") from error
    return fast


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, an empty one if there is no file. Raise ValueError."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: must be JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must hold a JSON object")  # noqa: TRY004  # the file is at fault, not a type
    return value


def _add_missing_tokens(fast: FastTokenizer, config: dict[str, Any]) -> None:
    """Add control tokens that only tokenizer_config.json names; never give one a new id."""
    for key, entry in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        content = entry["content"]
        known = fast.token_to_id(content)
        if known is None and int(key) == fast.get_vocab_size(with_added_tokens=True):
            flags = {name: entry.get(name, False) for name in ("single_word", "lstrip", "rstrip", "special")}
            token = AddedToken(content, normalized=entry.get("normalized", True), **flags)
            add = fast.add_special_tokens if flags["special"] else fast.add_tokens
            add([token])
