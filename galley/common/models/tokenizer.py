"""The model's tokenizer without transformers, so that the gateway needs no torch."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from galley.common.models.control_tokens import ControlTokens, separate
from galley.common.models.files import (
    DEFAULT_MODEL,
    TOKENIZER_FILES,
    code_asked_for,
    foreign_file,
    tokenizer_hash,
)
from galley.common.models.hub import local_directory
from galley.common.models.sampling_defaults import Recommended, recommended
from galley.common.models.token_bytes import TokenBytes
from galley.core.errors import InvalidField

_SPECIAL_VARIABLES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
MAX_RENDERED_CHARS = 8 * 1024 * 1024
_MAX_REASON_CHARS = 200
_MANY_TOKENS = 4096
# What a template raises when it is given messages that it was not written for.
_REFUSALS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    RecursionError,
)


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
        """Switch off truncation and padding of `fast`; `digest` is the tokenizer's `hash`.

        With `plain_messages`, control tokens that a message spells out are plain text. `recommendation`
        is that of the model's generation_config.json.
        """
        fast.no_truncation()
        fast.no_padding()
        self._fast = fast
        self._texts: dict[int, str] = {}
        """The texts of single tokens, as far as they were decoded."""
        self._template = template
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
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{directory}: must hold the tokenizer.json of a fast tokenizer")
        config = _read_json(directory / "tokenizer_config.json")
        if (reason := code_asked_for(config)) is not None:
            raise ValueError(f"{directory}/tokenizer_config.json: the tokenizer {reason}")
        try:
            fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises nothing narrower
            raise ValueError(f"{path}: must be a tokenizer: {error}") from error
        _add_missing_tokens(fast, config)
        return cls(
            fast,
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

    def encode_chat(self, messages: Sequence[Mapping[str, str]], most_tokens: int | None = None) -> list[int]:
        """Return the token ids of a chat up to the answer; each message has `role` and `content`.

        Raise InvalidField("messages") if the model has no chat template or its template refuses, and
        TooManyTokens if there are more than `most_tokens`.
        """
        if self._template is None:
            raise InvalidField("messages", "must be absent: the model has no chat template. Send text")
        if self._control_tokens is not None:
            messages = [self._control_tokens.mark(message) for message in messages]
        rendered = self._template.render(messages)
        return _ids(self._chat, rendered, most_tokens, add_special_tokens=False)

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
        return recommended(_read_json(path))
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


def _read_json(path: Path) -> dict[str, Any]:
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


class ChatTemplate:
    """A chat template, rendered as transformers renders it but without transformers.

    `source` is the model's template; `variables` are its special tokens (`bos_token`, ...). It is code of a
    third party: it runs in jinja2's immutable sandbox, and what it writes is bounded.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str],
        *,
        now: Callable[[], datetime] = lambda: datetime.now().astimezone(),  # the host's, as transformers
        max_chars: int = MAX_RENDERED_CHARS,
    ) -> None:
        try:
            self._template = _environment(now).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template: line {error.lineno}: {error.message}") from error
        self._variables = dict(variables)
        self._max_chars = max_chars

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Render up to where the assistant's answer begins.

        Raise InvalidField("messages") if the template refuses them or writes more than `max_chars`.
        """
        written = self._template.generate(
            messages=[dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **self._variables,
        )
        prompt = io.StringIO()
        try:
            for piece in written:
                prompt.write(piece)
                if prompt.tell() > self._max_chars:
                    break
        except _REFUSALS as error:
            reason = str(error)[:_MAX_REASON_CHARS]
            # Logs leave out what follows ", got": a template may quote a message.
            problem = f"the model's chat template refuses them, got its error: {reason}"
            raise InvalidField("messages", problem) from error
        if prompt.tell() > self._max_chars:
            raise InvalidField("messages", f"must come to at most {self._max_chars} characters as a prompt")
        return prompt.getvalue()


def _environment(now: Callable[[], datetime]) -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    environment.globals["dict"] = _SafeDict()
    environment.globals["namespace"] = _SafeNamespace
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _SafeDict:
    """A `dict` for templates, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Sequence[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _SafeNamespace(Namespace):
    """A `namespace` for templates, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `namespace(self=...)` must work
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,  # called by templates
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return `value` as JSON; jinja's own filter would escape HTML in it."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
