"""Check the schemas of requests for what llguidance would take, but not as JSON Schema means it.

Control characters: the grammar writes none, so that it would drop them from constants, names and patterns.
Counts of properties: the grammar may write a property twice, which counts as one. References in a circle:
no answer would ever be finished. Large integers: they would be rounded to a double.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any

from galley.core.grammar.limits import GrammarLimits, InvalidGrammar
from galley.core.grammar.schemas.costs import check_costs
from galley.core.grammar.schemas.patterns import rust_pattern
from galley.core.grammar.schemas.places import place_of
from galley.core.grammar.schemas.subschemas import (
    BASES,
    as_dict,
    as_list,
    certain_subschemas,
    depth,
    integers,
    merged,
    subschemas,
    target,
    texts,
)
from galley.core.grammar.spec import Kind

GUIDANCE = "x-guidance"
# JSON has an escape for each of \b, \t, \n, \f and \r.
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
# The same, written as an escape in a pattern. Classes that are negated or have ranges only become smaller.
_ESCAPED = re.compile(
    r"\\x(?:0[0-7bef]|1[0-9a-f]|7f)|\\u00(?:0[0-7bef]|1[0-9a-f]|7f)|\\c[a-z]|\\0|\\v|\\[xu]\{|(?-i:\\U|\\a)",
    re.IGNORECASE,
)
_WIDE_CLASS = re.compile(r"\[(?:\^|(?=(?:[^][\\-]|\\.)*+-))(?:[^][\\]|\\.)*+\]")
_MOST_NAME_CHARS = 64
_LARGEST = 1 << 53
"""llguidance computes numbers in double precision."""
_NO_BOUND = (1 << 63) - 1
_CONSTANTS = ("const", "enum", "multipleOf")
_BOUNDS = {"minimum": -1, "maximum": 1, "exclusiveMinimum": -1, "exclusiveMaximum": 1}


def check_schema(kind: Kind, schema: Any, limits: GrammarLimits) -> dict[str, Any]:
    """Return `schema`. Raise InvalidGrammar unless it is an object that llguidance reads as it is meant."""
    if not isinstance(schema, dict):
        raise InvalidGrammar(kind, "must be a JSON object")
    parts = subschemas(schema)
    for part in parts:
        try:
            _check_part(kind, part)
        except InvalidGrammar as error:
            place = place_of(schema, part)
            raise (InvalidGrammar(kind, f"{place}: {error.problem}") if place else error) from None
    _check_uncertain(kind, schema, parts)
    needs = {id(part): [id(need) for need in _needs(schema, part)] for part in parts}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError:
        raise InvalidGrammar(kind, "must allow a finite answer, got a part that contains itself") from None
    _check_levels(kind, schema, parts, limits)
    _check_sizes(kind, parts, limits)
    check_costs(kind, schema, parts)
    return schema


def _check_uncertain(kind: Kind, schema: dict[str, Any], parts: Sequence[dict[str, Any]]) -> None:
    """Raise InvalidGrammar for a pattern that has to be written anew, but may be part of a constant."""
    anew = [
        (id(part), pattern)
        for part in parts
        for pattern in _patterns(part)
        if rust_pattern(pattern) != pattern
    ]
    certain = {id(part) for part in certain_subschemas(schema)} if anew else ()
    for part, pattern in anew:
        if part not in certain:
            problem = "must have patterns below $defs where a $ref is no path from the root"
            raise InvalidGrammar(kind, f"{problem}, got {_short(pattern)}")


def _patterns(part: dict[str, Any]) -> list[str]:
    found = [part.get("pattern"), *as_dict(part.get("patternProperties"))]
    return [pattern for pattern in found if isinstance(pattern, str)]


def _check_levels(
    kind: Kind, schema: dict[str, Any], parts: Sequence[dict[str, Any]], limits: GrammarLimits
) -> None:
    """Raise InvalidGrammar where references lead through many levels: llguidance recurses through them."""
    found = [target(schema, part.get("$ref")) for part in parts]
    found += [part for part in parts if any(name in part for name in ("$anchor", *BASES))]
    places = {id(each): each for each in found if isinstance(each, dict)}
    levels = sum(map(depth, places.values()))
    if levels > limits.most_reference_levels:
        most = limits.most_reference_levels
        raise InvalidGrammar(
            kind, f"parts that references lead to must have at most {most} levels together, got {levels}"
        )


def _check_sizes(kind: Kind, parts: Sequence[dict[str, Any]], limits: GrammarLimits) -> None:
    named = [name for part in parts for name in as_dict(part.get("patternProperties"))]
    if len(named) > limits.most_pattern_properties:
        most = limits.most_pattern_properties
        raise InvalidGrammar(kind, f"must have at most {most} patternProperties, got {len(named)}")
    patterns = [part["pattern"] for part in parts if isinstance(part.get("pattern"), str)]
    size = sum(len(pattern.encode(errors="replace")) for pattern in {*named, *patterns})
    if size > limits.most_regex_bytes:
        most = limits.most_regex_bytes
        raise InvalidGrammar(kind, f"patterns must have at most {most} bytes together, got {size}")


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
    for pattern in texts(part.get("pattern")):
        _checked_pattern(kind, pattern)
    known = set[str]()
    for pattern in as_dict(part.get("patternProperties")):
        if (written := _checked_pattern(kind, pattern)) in known:
            raise InvalidGrammar(
                kind, f"must not have a pattern twice in patternProperties, got {_short(pattern)}"
            )
        known.add(written)
    _check_numbers(kind, part)
    least, certain = part.get("minProperties"), len(set(texts(part.get("required"))))
    if isinstance(least, int) and least > certain + 1:
        raise InvalidGrammar(
            kind, f"minProperties must be at most one more than the {certain} required, got {least}"
        )


def _checked_pattern(kind: Kind, pattern: str) -> str:
    """Return a pattern as llguidance reads it. Raise InvalidGrammar for what it reads otherwise."""
    narrow = _WIDE_CLASS.sub("", pattern.replace(r"\\", ""))
    if _CONTROL.search(narrow) or _ESCAPED.search(narrow):
        raise InvalidGrammar(kind, f"must not have a control character in a pattern, got {_short(pattern)}")
    try:
        return rust_pattern(pattern)
    except ValueError as error:
        raise InvalidGrammar(kind, f"{error} in a pattern, got {_short(pattern)}") from None


def _check_numbers(kind: Kind, part: dict[str, Any]) -> None:
    for number in integers([part.get(name) for name in _CONSTANTS]):
        if abs(number) > _LARGEST:
            raise InvalidGrammar(kind, f"must have integers of at most 2**53, got {_short(str(number))}")
    for name, sign in _BOUNDS.items():
        bound = part.get(name)
        # Whatever fits in 64 bits is within a bound beyond them.
        if not isinstance(bound, int | float) or part.get("type") == "number":
            continue
        largest = _LARGEST - name.startswith("exclusive")
        if abs(bound) > largest and sign * bound < _NO_BOUND:
            raise InvalidGrammar(kind, f"{name} must be at most 2**53, got {_short(str(bound))}")


def _short(text: str) -> str:
    return repr(text[:_MOST_NAME_CHARS])
