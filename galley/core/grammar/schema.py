"""Check the schemas of requests for what llguidance would take, but not as JSON Schema means it.

Control characters: the grammar writes none, so that it would drop them from constants, names and patterns.
Counts of properties: the grammar may write a property twice, which counts as one. References in a circle:
no answer would ever be finished. Large integers: they would be rounded to a double.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any

from galley.core.grammar.costs import check_costs
from galley.core.grammar.limits import InvalidGrammar
from galley.core.grammar.spec import Kind
from galley.core.grammar.subschemas import as_dict, as_list, integers, merged, subschemas, texts

GUIDANCE = "x-guidance"
# JSON has an escape for each of \b, \t, \n, \f and \r.
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
# The same, written as an escape in a pattern. Classes that are negated or have ranges only become smaller.
_ESCAPED = re.compile(
    r"\\x(?:0[0-7bef]|1[0-9a-f]|7f)|\\u00(?:0[0-7bef]|1[0-9a-f]|7f)|\\c[a-z]|\\0|\\v", re.IGNORECASE
)
_WIDE_CLASS = re.compile(r"\[(?:\^|(?=(?:[^][\\-]|\\.)*+-))(?:[^][\\]|\\.)*+\]")
_MOST_NAME_CHARS = 64
# A double holds no integer beyond 1.8e308.
_LARGEST = 10**308
_NUMBERS = ("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def check_schema(kind: Kind, schema: Any) -> dict[str, Any]:
    """Return `schema`. Raise InvalidGrammar unless it is an object that llguidance reads as it is meant."""
    if not isinstance(schema, dict):
        raise InvalidGrammar(kind, "must be a JSON object")
    parts = subschemas(schema)
    for part in parts:
        _check_part(kind, part)
    needs = {id(part): [id(need) for need in _needs(schema, part)] for part in parts}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError:
        raise InvalidGrammar(kind, "must allow a finite answer, got a part that contains itself") from None
    check_costs(kind, schema, parts)
    return schema


def _needs(root: dict[str, Any], part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the schemas for each of which an answer of `part` has a value."""
    yield from merged(root, part)
    if part.get("type") == "object":
        properties = as_dict(part.get("properties"))
        required = [properties.get(name) for name in as_list(part.get("required")) if isinstance(name, str)]
        yield from (each for each in required if isinstance(each, dict))
    least = part.get("minItems")
    if part.get("type") == "array" and isinstance(least, int) and least > 0:
        first = as_list(part.get("prefixItems"))[:least]
        each = first if len(first) == least else [*first, part.get("items")]
        yield from (need for need in each if isinstance(need, dict))


def _check_part(kind: Kind, part: dict[str, Any]) -> None:
    if GUIDANCE in part:
        raise InvalidGrammar(kind, f"must not have {GUIDANCE}")
    names = [*as_dict(part.get("properties")), *as_list(part.get("required"))]
    for text in texts([part.get("const"), part.get("enum"), names]):
        if _CONTROL.search(text):
            raise InvalidGrammar(kind, f"must not have a control character, got {_short(text)}")
    for pattern in texts([part.get("pattern"), list(as_dict(part.get("patternProperties")))]):
        narrow = _WIDE_CLASS.sub("", pattern)
        if _CONTROL.search(narrow) or _ESCAPED.search(narrow):
            raise InvalidGrammar(
                kind, f"must not have a control character in a pattern, got {_short(pattern)}"
            )
    for number in integers([part.get(name) for name in _NUMBERS]):
        if abs(number) > _LARGEST or int(float(number)) != number:
            raise InvalidGrammar(kind, f"must have numbers that a double holds, got {_short(str(number))}")
    least, certain = part.get("minProperties"), len(set(texts(part.get("required"))))
    if isinstance(least, int) and least > certain + 1:
        raise InvalidGrammar(
            kind, f"minProperties must be at most one more than the {certain} required, got {least}"
        )


def _short(text: str) -> str:
    return repr(text[:_MOST_NAME_CHARS])
