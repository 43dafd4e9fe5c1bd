"""The model's tokenizer without transformers, so that the gateway needs no torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from galley.common.models.chat_template import ChatTemplate
from galley.common.models.control_tokens import ControlTokens, separate
from galley.common.models.fast_tokenizer import CONFIG, load_fast_tokenizer, read_json
from galley.common.models.files import (
    DEFAULT_MODEL,
    TOKENIZER_FILES,
    code_asked_for,
    foreign_file,
    tokenizer_hash,
)
from galley.common.models.hub import local_directory
from galley.common.models.reasoning import ReasoningMarks, reasoning_marks
from galley.common.models.sampling_defaults import Recommended, recommended
from galley.common.models.token_bytes import TokenBytes
from galley.core.errors import InvalidField

_SPECIAL_VARIABLES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_MANY_TOKENS = 4096


class TooManyTokens(Exception):
    """A text has more tokens than the caller can use; `tokens` is how many."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"the text has {tokens} tokens")
        self.tokens = tokens


class Tokenizer:
    """Text to token ids and back, as the model's own files say.

    Safe to use from several threads. Other threads run while a text is encoded, or many tokens are decoded.
    """

    def __init__(
        self,
        fast: FastTokenizer,
        template: ChatTemplate | None,
        digest: str,
        *,
        plain_messages: bool,
        recommendation: Recommended,
    ) -> None:
        """`digest` is the tokenizer's `hash`.

        With `plain_messages`, control tokens that a message spells out are plain text. `recommendation`
        is that of the model's generation_config.json.
        """
        self._fast = fast
        self._texts: dict[int, str] = {}
        """The texts of single tokens, as far as they were decoded."""
        # Kept, because tokenizers copies thousands of entries at each call.
        self._added = {token.content: index for index, token in fast.get_added_tokens_decoder().items()}
        self.template = template
        self._chat = fast
        self._control_tokens: ControlTokens | None = None
        if plain_messages and template is not None:
            self._chat, self._control_tokens = separate(fast)
        self.hash = digest
        self.recommended = recommendation

    @classmethod
    def load(cls, model: str, *, control_tokens_in_messages: bool = True) -> Tokenizer:
        """Load from a local directory, or from a hub model, whose tokenizer files are then downloaded.

        With `control_tokens_in_messages`, control tokens that a message spells out are read as such, as in
        transformers; otherwise they are plain text.

        Raise UnsupportedModel if the hub does not give it, FileNotFoundError if there is no tokenizer.json,
        ValueError or NoTokenizer if one of the files is broken, lies elsewhere, or asks for code.
        """
        directory = _directory(model)
        if (reason := foreign_file(directory, TOKENIZER_FILES)) is not None:
            raise ValueError(reason)
        config = read_json(directory / CONFIG)
        if (reason := code_asked_for(config)) is not None:
            raise ValueError(f"{directory / CONFIG}: the tokenizer {reason}")
        return cls(
            load_fast_tokenizer(directory, config),
            _chat_template(directory, config),
            tokenizer_hash(directory),
            plain_messages=not control_tokens_in_messages,
            recommendation=_recommendation(directory / "generation_config.json"),
        )

    @property
    def vocab_size(self) -> int:
        """Return the number of known tokens, added ones included; a model may pad its vocabulary beyond."""
        return int(self._fast.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, most_tokens: int | None = None) -> list[int]:
        """Return the token ids of a text to complete, with the special tokens that the model's rules add.

        Raise TooManyTokens if there are more than `most_tokens`.
        """
        return _ids(self._fast, text, most_tokens)

    def encode_output(self, text: str, most_tokens: int | None = None) -> list[int]:
        """Return the token ids of a text that the model may write, without special tokens around it.

        Raise TooManyTokens if there are more than `most_tokens`.
        """
        return _ids(self._fast, text, most_tokens, add_special_tokens=False)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        most_tokens: int | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """Return the token ids of a chat up to the answer; each message has `role` and `content`.

        `tools` are as OpenAI's API has them; `more` are further variables of the template.
        Raise InvalidField("messages") if the model has no chat template or its template refuses,
        InvalidField("tools") if the template takes none, and TooManyTokens if there are more than
        `most_tokens`.
        """
        if self.template is None:
            raise InvalidField("messages", "must be absent: the model has no chat template. Send text")
        if self._control_tokens is not None:
            messages, tools = self._control_tokens.mark(messages), self._control_tokens.mark(tools)
        rendered = self.template.render(messages, tools, more)
        return _ids(self._chat, rendered, most_tokens, add_special_tokens=False)

    def to_json(self) -> str:
        """Return the text of a tokenizer.json that has the tokens of tokenizer_config.json, too."""
        return str(self._fast.to_str())

    @cached_property
    def reasoning(self) -> ReasoningMarks | None:
        """Return the tokens around the model's reasoning; None if it has none."""
        return reasoning_marks(self._added)

    def tokens_of_reasoning(self, prompt: Sequence[int], *, is_chat: bool) -> tuple[int | None, int | None]:
        """Return the token that opens the reasoning of an answer, and the one after which its grammar begins.

        The first is None if the prompt opened it; both are, if the answer has none. Only answers of chats
        open it by themselves.
        """
        marks = self.reasoning
        if marks is None:
            return None, None
        if marks.is_open(prompt, self.decode):
            return None, marks.closing_token
        return (marks.opening_token, marks.closing_token) if is_chat else (None, None)

    def added_token(self, text: str) -> int | None:
        """Return the token that was added to the vocabulary for this text; None if there is none."""
        return self._added.get(text)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        return TokenBytes(self._fast)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without control tokens; unfinished UTF-8 reads as U+FFFD."""
        if len(ids) == 1:  # each token of an answer is decoded after the one before, and alone
            [token] = ids
            if (known := self._texts.get(token)) is None:
                known = self._texts[token] = str(self._fast.decode([token], skip_special_tokens=True))
            return known
        if len(ids) < _MANY_TOKENS:
            return str(self._fast.decode(list(ids), skip_special_tokens=True))
        # A batch of one: `decode` holds the interpreter's lock until it is done, 20 ms for 100,000 tokens.
        [text] = self._fast.decode_batch([list(ids)], skip_special_tokens=True)
        return str(text)


def _ids(
    fast: FastTokenizer, text: str, most_tokens: int | None, *, add_special_tokens: bool = True
) -> list[int]:
    # A batch of one: `encode` holds the interpreter's lock until it is done.
    [encoding] = fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    if most_tokens is not None and len(encoding) > most_tokens:
        raise TooManyTokens(len(encoding))
    return list(encoding.ids)


def _recommendation(path: Path) -> Recommended:
    try:
        return recommended(read_json(path))
    except InvalidField as fault:
        raise ValueError(f"{path}: {fault}") from fault


def _directory(model: str) -> Path:
    if model == DEFAULT_MODEL:
        return _default_directory()
    return local_directory(model, TOKENIZER_FILES)


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


def _chat_template(directory: Path, config: dict[str, Any]) -> ChatTemplate | None:
    path = directory / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    named = {entry["name"]: entry["template"] for entry in source} if isinstance(source, list) else {}
    source = named.get("default") if named else source
    if not isinstance(source, str):
        return None
    return ChatTemplate(source, _special_variables(directory, config), tools_source=named.get("tool_use"))


def _special_variables(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    given = read_json(directory / "special_tokens_map.json") | config
    values = {name: given.get(name) for name in _SPECIAL_VARIABLES}
    texts = {name: it.get("content") if isinstance(it, dict) else it for name, it in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
