"""Hash tokenizers, so that a draft and a target with different ones are not paired."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

from galley.common.models.files import foreign_file
from galley.core.errors import CallerFault

HASH_BYTES = 16


class NoTokenizer(CallerFault):
    """The model's directory has no tokenizer.json that can be read."""


def tokenizer_hash(directory: Path) -> str:
    """Return the blake2b-128, in hex, of the text of each token id, added tokens included.

    Draft and target agree on tokens exactly if they agree on this table; how text is cut is the gateway's
    business alone. Raise NoTokenizer.
    """
    if (reason := foreign_file(directory, ("tokenizer.json",))) is not None:
        raise NoTokenizer(reason)
    table = sorted(_token_table(directory / "tokenizer.json").items())
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":"))
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=HASH_BYTES).hexdigest()


def _token_table(path: Path) -> dict[int, str]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        added = content.get("added_tokens") or []
        # Unigram lists [token, score] in the order of ids; BPE, WordPiece and WordLevel map token to id.
        if isinstance(vocabulary, list):
            table = {token_id: entry[0] for token_id, entry in enumerate(vocabulary)}
        else:
            table = {token_id: token for token, token_id in vocabulary.items()}
        return table | {entry["id"]: entry["content"] for entry in added}
    except FileNotFoundError:
        raise NoTokenizer(f"{path.parent} has no tokenizer.json; a fast tokenizer is needed") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise NoTokenizer(f"{path} is not a tokenizer that can be read: {error!r}") from error
