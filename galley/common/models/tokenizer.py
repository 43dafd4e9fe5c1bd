"""The model's tokenizer without transformers, so that the gateway needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from galley.common.models.chat_template import ChatTemplate
from galley.common.models.files import DEFAULT_MODEL, code_asked_for, foreign_file, hub_model, tokenizer_hash
from galley.core.errors import InvalidField

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
)
_SPECIAL_VARIABLES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


class Tokenizer:
    """Text to token ids and back, as the model's own files say. Safe to use from several threads."""

    def __init__(self, fast: FastTokenizer, template: ChatTemplate | None, digest: str) -> None:
        """Switch off truncation and padding of `fast`; `digest` is the tokenizer's `hash`."""
        fast.no_truncation()
        fast.no_padding()
        self._fast = fast
        self._template = template
        self.hash = digest

    @classmethod
    def load(cls, model: str) -> Tokenizer:
        """Load from a local directory, or from a hub model, whose tokenizer files are then downloaded.

        Raise FileNotFoundError if there is no tokenizer.json, ValueError if one of the files is broken, lies
        elsewhere, or asks for code.
        """
        directory = _directory(model)
        if (reason := foreign_file(directory, FILES)) is not None:
            raise ValueError(reason)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{directory} has no tokenizer.json")
        config = _read_json(directory / "tokenizer_config.json")
        if (reason := code_asked_for(config)) is not None:
            raise ValueError(f"{directory}/tokenizer_config.json: the tokenizer {reason}")
        try:
            fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises nothing narrower
            raise ValueError(f"{path} is no tokenizer: {error}") from error
        _add_missing_tokens(fast, config)
        return cls(fast, _chat_template(directory, config), tokenizer_hash(directory))

    @property
    def vocab_size(self) -> int:
        """Return the number of known tokens, added ones included; a model may pad its vocabulary beyond."""
        return int(self._fast.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text to complete, with the special tokens that the model's rules add."""
        return list(self._fast.encode(text).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the token ids of a chat up to the answer; each message has `role` and `content`.

        Control tokens that a message spells out are read as such, as in transformers. Raise
        InvalidField("messages") if the model has no chat template or its template refuses.
        """
        if self._template is None:
            raise InvalidField("messages", "the model has no chat template; send text instead")
        rendered = self._template.render(messages)
        return list(self._fast.encode(rendered, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without control tokens; unfinished UTF-8 reads as U+FFFD."""
        return str(self._fast.decode(list(ids), skip_special_tokens=True))


def _directory(model: str) -> Path:
    if model == DEFAULT_MODEL:
        return _default_directory()
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    # Loaded here because it takes a tenth of the gateway's start.
    from huggingface_hub import errors, snapshot_download  # noqa: PLC0415

    name, revision = hub_model(model)
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(FILES)))
    except (errors.HfHubHTTPError, errors.HFValidationError, errors.LocalEntryNotFoundError) as error:
        raise FileNotFoundError(
            f"{model!r} is no directory, and no model that the hub gives: {error}"
        ) from error


def _default_directory() -> Path:
    """Return where the default model was converted to; convert it first if that was not done yet.

    The engine does that in a process of its own, so that the gateway loads no torch.
    """
    command = [sys.executable, "-m", "galley.engine.load.resolve", DEFAULT_MODEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  # our own
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2]
        raise FileNotFoundError(
            f"model: must be a directory or a hub id where the engine is not installed, "
            f"got {DEFAULT_MODEL!r} ({reason})"
        )
    return Path(done.stdout.strip())


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object")  # noqa: TRY004  # the file is at fault, not a type
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


def _chat_template(directory: Path, config: dict[str, Any]) -> ChatTemplate | None:
    path = directory / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    return ChatTemplate(source, _special_variables(directory, config)) if isinstance(source, str) else None


def _special_variables(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    given = _read_json(directory / "special_tokens_map.json") | config
    values = {name: given.get(name) for name in _SPECIAL_VARIABLES}
    texts = {name: it.get("content") if isinstance(it, dict) else it for name, it in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
