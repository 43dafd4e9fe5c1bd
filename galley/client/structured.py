"""JSON schemas of answers, and the values that answers of them stand for.

A schema is a dict, a pydantic model, or a pydantic TypeAdapter. Models and adapters are known by their
methods, so that the client does not need pydantic.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

# The methods of a model class, and of a TypeAdapter: its JSON schema, and a value from JSON text.
_METHODS = (("model_json_schema", "model_validate_json"), ("json_schema", "validate_json"))
# A model that reasons first writes its JSON after one of these.
_END_OF_REASONING = re.compile(r"</think>|\[/THINK\]")
_MOST_MARKS = 8


def schema_json(name: str, schema: object) -> str:
    """Return the JSON text of a schema. Raises TypeError or ValueError, which begins with `name`."""
    found = schema
    if not isinstance(schema, Mapping):
        found = next(
            (getattr(schema, of)() for of, _ in _METHODS if callable(getattr(schema, of, None))), None
        )
    if not isinstance(found, Mapping):
        raise TypeError(f"{name}: must be a dict or a pydantic model, got {_kind(schema)}")
    try:
        return json.dumps(dict(found), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: must be JSON: {error}") from None


def parser_of(schema: object) -> Callable[[str], Any] | None:
    """Return the function from an answer of `schema` to its value; None without a schema."""
    if schema is None:
        return None
    if isinstance(schema, Mapping):
        return functools.partial(_parse, json.loads)
    parsers = [getattr(schema, parse) for _, parse in _METHODS if hasattr(schema, parse)]
    return functools.partial(_parse, parsers[0])


def _parse(parse: Callable[[str], Any], text: str) -> Any:
    """Return the value of the JSON in a text, which may have reasoning before it. Raises ValueError."""
    starts = [0]
    for mark in islice(_END_OF_REASONING.finditer(text), _MOST_MARKS):
        # A string of the JSON may spell the mark; what follows it there is no answer.
        if not any(_ends_in_string(text[start : mark.start()]) for start in starts):
            starts.append(mark.end())
    for start in starts[:-1]:
        with contextlib.suppress(ValueError):
            return _parsed(parse, text[start:])
    return _parsed(parse, text[starts[-1] :])


def _parsed(parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except RecursionError:
        raise ValueError("the answer is nested too deeply") from None


def _ends_in_string(text: str) -> bool:
    """Return True if the text is the beginning of JSON, up to within one of its strings."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except RecursionError:
        pass
    return False


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
