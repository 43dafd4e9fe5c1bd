"""The files of a model: which may be read (those in its directory, and no code), and its tokenizer's hash.

Models are untrusted. A link out of the directory would disclose the file that it points to. The hub's cache
consists of links from a snapshot to its blobs, which are allowed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, TypeAlias

from galley.core.errors import CallerFault

NumberFormat: TypeAlias = Literal["bfloat16", "float32"]
"""The types of weights and KV that replicas take."""

# The model that is served where none is named: it comes with the installation, as a GGUF of 4 bits.
DEFAULT_MODEL = "smollm2-135m-instruct"

# The section of config.json that makes a directory a trained draft's (galley/engine/load/draft_directory.py).
DRAFT_SECTION = "galley_draft"

# Files of a model's directory that are read.
MODEL_FILES = ("*.safetensors", "*.json", "tokenizer*", "*.model", "*.jinja", "merges.txt", "vocab.txt")
# Matching files of a hub's repository that are not read: those in folders, and weights in Mistral's own form.
IGNORED_FILES = ("*/*", "consolidated*")
# Those of MODEL_FILES that a gateway reads.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
)

# Where a model's end tokens are, the first that has them.
CONFIGS = ("generation_config.json", "config.json")

_SNAPSHOTS, _BLOBS = "snapshots", "blobs"
HASH_BYTES = 16

# Drafts that come with the installation, each in a directory called as its target.
_DRAFTS = Path(__file__).parents[3] / "services" / "draft" / "models"


def shipped_draft(model: str) -> Path | None:
    """Return the directory of the draft for the default model if `model` is that or empty, else None."""
    directory = _DRAFTS / DEFAULT_MODEL
    return directory if model in {"", DEFAULT_MODEL} and directory.is_dir() else None


def foreign_file(directory: Path, patterns: Iterable[str]) -> str | None:
    """Return which matching file may not be read, and why; None if all may."""
    homes = _homes(directory)
    for path in sorted({path for pattern in patterns for path in directory.glob(pattern)}):
        try:
            real = path.resolve(strict=True)
        except (OSError, RuntimeError):
            return f"{path}: is a link to nothing"
        if not any(real.is_relative_to(home) for home in homes):
            return f"{path}: is a link that leads out of the model's directory"
        if not (real.is_file() or real.is_dir()):
            return f"{path}: must be a file or a directory"
    return None


def _homes(directory: Path) -> list[Path]:
    real = directory.resolve()
    in_hub_cache = real.parent.name == _SNAPSHOTS
    return [real, *([real.parents[1] / _BLOBS] if in_hub_cache else [])]


def code_asked_for(config: Mapping[str, Any]) -> str | None:
    """Return why the model needs code from its repository, or None if it needs none."""
    return "needs code from its repository (auto_map), which is never run" if config.get("auto_map") else None


def hub_model(spec: str) -> tuple[str, str | None]:
    """Split `owner/model@revision` into name and revision, which is None if there is none.

    A commit as the revision fixes the files; their owner can move a branch or a tag.
    """
    name, _, revision = spec.partition("@")
    return name, revision or None


def model_path(spec: str) -> Path:
    """Return the path that a model may be at; `~` stays as it is without a home directory."""
    with suppress(RuntimeError):
        return Path(spec).expanduser()
    return Path(spec)


def model_name(spec: str) -> str:
    """Return the name that targets report: a hub id without its revision, or the last part of a path."""
    path = model_path(spec)
    if path.suffix == ".gguf":
        return path.stem
    return path.resolve().name if path.is_dir() else hub_model(spec)[0]


class NoTokenizer(CallerFault):
    """The model's directory has no tokenizer.json that can be read."""


def tokenizer_hash(directory: Path) -> str:
    """Return the blake2b-128, in hex, of the text of each token id, added tokens included.

    Draft and target agree on tokens exactly if they agree on this table; how text is cut is the gateway's
    business alone. Raise NoTokenizer.
    """
    if (reason := foreign_file(directory, ("tokenizer.json",))) is not None:
        raise NoTokenizer(reason)
    table = sorted(token_table(directory / "tokenizer.json").items())
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":"))
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=HASH_BYTES).hexdigest()


def token_table(path: Path) -> dict[int, str]:
    """Return the text of each token id of a tokenizer.json. Raise NoTokenizer."""
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
        raise NoTokenizer(f"{path.parent}: must hold the tokenizer.json of a fast tokenizer") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise NoTokenizer(f"{path}: must be a tokenizer that can be read: {error!r}") from error


def end_token_ids(directory: Path) -> tuple[int, ...]:
    """Return the end tokens of the model in `directory`, none if its files name none."""
    for name in CONFIGS:
        try:
            ids = json.loads((directory / name).read_text(encoding="utf-8"))["eos_token_id"]
            return (ids,) if isinstance(ids, int) else tuple(map(int, ids))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # absent or null, here or in a file that is absent
    return ()
