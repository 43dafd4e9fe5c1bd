"""Checks of what a caller passes to `generate`, `stream` and `chat`.

Each check returns the value as the request takes it. It raises TypeError or ValueError in one line that
begins with the name of the argument. Bounds that depend on the model, such as the context window, are the
gateway's.
"""

from __future__ import annotations

import difflib
import inspect
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, get_type_hints

from galley.client.options import GenerateOptions, Message, Speculation
from galley.client.structured import schema_json

_MODES = {"auto": Speculation(), "off": Speculation(off=True)}
# Names of other libraries that a comparison of letters would miss.
_ELSEWHERE = {
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "response_format": "schema",
    "guided_json": "schema",
}
FORMS = ("schema", "regex", "choice", "grammar", "structural_tag")
"""The options of which a request has one at most."""
_MOST_QUOTED = 60
_Method = TypeVar("_Method", bound=Callable[..., Any])


def show_options(method: _Method) -> _Method:
    """Show help() and completion each keyword argument of `**options: Unpack[GenerateOptions]`."""
    *own, _ = inspect.signature(method).parameters.values()
    hints = get_type_hints(GenerateOptions)
    named = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)
        for name, hint in hints.items()
    ]
    vars(method)["__signature__"] = inspect.Signature([*own, *named])
    return method


def check_names(method: str, options: Iterable[str]) -> None:
    """Raise TypeError for the first keyword argument that `method` does not have; name the nearest one."""
    for name in options:
        if name not in _CHECKS:
            nearest = _ELSEWHERE.get(name) or next(iter(difflib.get_close_matches(name, _CHECKS, n=1)), None)
            hint = f"Did you mean '{nearest}'?" if nearest else f"It has {', '.join(sorted(_CHECKS))}."
            raise TypeError(f"{method}() got an unexpected keyword argument '{name}'. {hint}")


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are not None, each as the request takes it."""
    given = {name: _CHECKS[name](name, value) for name, value in options.items() if value is not None}
    forms = [name for name in FORMS if name in given]
    if len(forms) > 1:
        raise ValueError(f"{forms[1]}: cannot be combined with {forms[0]}")
    return given


def checked_prompt(name: str, prompt: object) -> str | list[Message] | list[int]:
    """Return the text, the messages or the token ids of `prompt`."""
    if isinstance(prompt, str):
        return _text(name, prompt)
    if _is_message(prompt):
        raise TypeError(f"{name}: must be a list of messages, got one message")
    if isinstance(prompt, bytes | bytearray | memoryview) or not isinstance(prompt, Iterable):
        raise TypeError(f"{name}: must be text, messages or token ids, got {_kind(prompt)}")
    parts = list(prompt)
    for index, part in enumerate(parts):
        if not (_is_message(part) or _is_integer(part)):
            raise TypeError(f"{name}[{index}]: must be a message or a token id, got {_kind(part)}")
    if not any(map(_is_message, parts)):
        return [_TOKEN_ID(f"{name}[{index}]", part) for index, part in enumerate(parts)]
    if not all(map(_is_message, parts)):
        raise TypeError(f"{name}: must be text, messages or token ids, got messages and token ids")
    return [_message(f"{name}[{index}]", part) for index, part in enumerate(parts)]


def checked_messages(messages: object) -> list[Message]:
    """Return the messages of a conversation; text is one message of the user."""
    if isinstance(messages, str):
        return [Message("user", _text("messages", messages))]
    checked = checked_prompt("messages", messages)
    turns = [part for part in checked if isinstance(part, Message)]
    if not turns:
        problem = "token ids" if checked else "none"
        raise TypeError(f"messages: must be at least one message, or the text of one, got {problem}")
    return turns


def checked_resume_point(session_id: object, next_index: object, seen_hash: bytes) -> tuple[str, int, bytes]:
    """Return the arguments of `resume`, but for its options."""
    check_type("seen_hash", seen_hash, bytes, "bytes")
    return _text("session_id", session_id), _UINT32("next_index", next_index), seen_hash


def check_type(name: str, value: object, types: Any, expected: str) -> None:
    """Raise TypeError if `value`, which may be a secret and is not shown, is not of `types`."""
    if not isinstance(value, types):
        raise TypeError(f"{name}: must be {expected}, got {_kind(value)}")


def _is_message(part: object) -> bool:
    return isinstance(part, Message | Mapping)


def _message(name: str, part: Message | Mapping[str, Any]) -> Message:
    given = {"role": part.role, "content": part.content} if isinstance(part, Message) else part
    for key, value in given.items():
        if key not in {"role", "content"} and value is not None:
            raise ValueError(f"{name}: must have role and content only, got {_excerpt(key)}")
    for key in ("role", "content"):
        if given.get(key) is None:
            raise ValueError(f"{name}: must have {key}, got {_excerpt(dict(given))}")
    return Message(_text(f"{name}.role", given["role"]), _text(f"{name}.content", given["content"]))


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name}: must be text, got {_kind(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        problem = f"got half of a surrogate pair at character {error.start}"
        raise ValueError(f"{name}: must be text that UTF-8 can encode, {problem}") from None
    return value


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: must be True or False, got {_excerpt(value)}")
    return value


def _is_integer(value: object) -> bool:
    return hasattr(type(value), "__index__") and not isinstance(value, bool)


def _integer(least: int, most: int) -> Callable[[str, object], int]:
    def check(name: str, value: Any) -> int:
        if not _is_integer(value):
            raise TypeError(f"{name}: must be an integer, got {_excerpt(value)}")
        if not least <= (number := operator.index(value)) <= most:
            raise ValueError(f"{name}: must be in [{least}, {most}], got {number}")
        return number

    return check


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: must be a number, got {_excerpt(value)}")
    return float(value)


def _seconds(name: str, value: object) -> float:
    seconds = _number(name, value)
    if not 0 < seconds < math.inf:
        raise ValueError(f"{name}: must be a finite time above 0, in seconds, got {seconds:g}")
    return seconds


def _texts(name: str, value: object) -> list[str]:
    if isinstance(value, str):
        return [_text(name, value)]
    if isinstance(value, bytes | bytearray | Mapping) or not isinstance(value, Iterable):
        raise TypeError(f"{name}: must be text or a list of texts, got {_excerpt(value)}")
    return [_text(f"{name}[{index}]", part) for index, part in enumerate(value)]


def _token_ids(name: str, value: object) -> list[int]:
    if isinstance(value, str | bytes | bytearray | Mapping) or not isinstance(value, Iterable):
        raise TypeError(f"{name}: must be a list of token ids, got {_excerpt(value)}")
    return [_TOKEN_ID(f"{name}[{index}]", part) for index, part in enumerate(value)]


def _schema(name: str, value: object) -> str:
    return _text(name, schema_json(name, value))


def _structural_tag(name: str, value: object) -> str:
    if not isinstance(value, str | Mapping):
        raise TypeError(f"{name}: must be a dict or JSON, got {_kind(value)}")
    return _text(name, value) if isinstance(value, str) else _schema(name, value)


def _choices(name: str, value: object) -> list[str]:
    if isinstance(value, str):  # its letters would be a choice each, or it the only one
        raise TypeError(f"{name}: must be a list of texts, got {_excerpt(value)}")
    return _texts(name, value)


def _prediction(name: str, value: object) -> str | list[int]:
    return _text(name, value) if isinstance(value, str) else _token_ids(name, value)


def _logit_bias(name: str, value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}: must map token ids to numbers, got {_excerpt(value)}")
    return {_TOKEN_ID(f"{name} key", key): _number(f"{name}[{key}]", bias) for key, bias in value.items()}


def _speculation(name: str, value: object) -> Speculation:
    if isinstance(value, str) and value in _MODES:
        return _MODES[value]
    if not isinstance(value, Speculation):
        problem = f'must be "auto", "off" or Speculation(k=…, strategy=…), got {_excerpt(value)}'
        raise ValueError(f"{name}: {problem}") if isinstance(value, str) else TypeError(f"{name}: {problem}")
    strategy = _text(f"{name}.strategy", value.strategy)
    k = None if value.k is None else _UINT32(f"{name}.k", value.k)
    width = None if value.width is None else _UINT32(f"{name}.width", value.width)
    return Speculation(_flag(f"{name}.off", value.off), k, strategy, width)


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__


def _excerpt(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_QUOTED else f"{text[:_MOST_QUOTED]}… ({_kind(value)})"


_INT32 = _integer(-(2**31), 2**31 - 1)
_UINT32 = _TOKEN_ID = _integer(0, 2**32 - 1)
_UINT64 = _integer(0, 2**64 - 1)
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "model": _text,
    "lora": _text,
    "max_tokens": _UINT32,
    "min_tokens": _UINT32,
    "temperature": _number,
    "top_p": _number,
    "top_k": _UINT32,
    "min_p": _number,
    "frequency_penalty": _number,
    "presence_penalty": _number,
    "repetition_penalty": _number,
    "logit_bias": _logit_bias,
    "seed": _UINT64,
    "stop": _texts,
    "stop_token_ids": _token_ids,
    "ignore_eos": _flag,
    "logprobs": _UINT32,
    "schema": _schema,
    "regex": _text,
    "choice": _choices,
    "grammar": _text,
    "structural_tag": _structural_tag,
    "prediction": _prediction,
    "speculation": _speculation,
    "workload": _text,
    "idempotency_key": _text,
    "priority": _INT32,
    "continue_without_client": _flag,
    "no_audit": _flag,
    "timeout_s": _seconds,
    "force_trace": _flag,
}
