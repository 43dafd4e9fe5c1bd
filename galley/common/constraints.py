"""Word what pydantic finds wrong with a value as all errors are worded: how the value must be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_MUST = {
    "missing": "must be given",
    "extra_forbidden": "unknown",
    "unexpected_keyword_argument": "unknown",
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "int_type": "must be an integer",
    "int_parsing": "must be an integer",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "list_type": "must be a list",
    "dict_type": "must be a JSON object",
    "model_type": "must be a JSON object",
    "model_attributes_type": "must be a JSON object",
}
_BEGIN = re.compile("^(Input|Value|String|List|Dictionary) should ")
_MOST_DIGITS = 20
_MOST_BITS = 64


def constraint_of(problem: Mapping[str, Any]) -> str:
    """Return how a value must be, for one of pydantic's problems.

    Only numbers out of bounds are quoted: another value may be a secret.
    """
    kind, value, bound = problem["type"], problem["input"], problem.get("ctx", {})
    if kind in _MUST:
        return _MUST[kind]
    match kind:
        case "greater_than_equal":
            return f"must be at least {_number(bound['ge'])}{_got(value)}"
        case "greater_than":
            return f"must be above {_number(bound['gt'])}{_got(value)}"
        case "less_than_equal":
            return f"must be at most {_number(bound['le'])}{_got(value)}"
        case "less_than":
            most = bound["lt"]
            limit = f"at most {most - 1}" if isinstance(most, int) else f"below {_number(most)}"
            return f"must be {limit}{_got(value)}"
        case "too_long":
            return f"must have at most {bound['max_length']} entries, got {len(value)}"
        case "string_too_long":
            return f"must have at most {bound['max_length']} characters, got {len(value)}"
    return _BEGIN.sub("must ", str(problem["msg"]).removeprefix("Value error, "))


def _number(value: float) -> str:
    """Return 1 for 1.0, which is how pydantic keeps an integer bound of a float."""
    return str(int(value)) if value == int(value) else str(value)


def _got(value: float | str) -> str:
    """Return the number that was given, possibly as text; nothing if it is long."""
    if isinstance(value, int):
        return f", got {value}" if value.bit_length() <= _MOST_BITS else ""
    text = str(value)
    return f", got {text}" if len(text) <= _MOST_DIGITS else ""
