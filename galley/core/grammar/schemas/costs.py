"""Refuse grammars that take llguidance seconds to minutes, because its limits do not cover their work.

Patterns of one value take time exponential in their number, and a multiple time quadratic in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from math import lcm
from typing import Any

from galley.core.grammar.limits import InvalidGrammar
from galley.core.grammar.schemas.subschemas import (
    as_list,
    children,
    merged,
    options,
    refers_by_path,
    subschemas,
)
from galley.core.grammar.spec import Kind

MOST_INTERSECTED = 8
MOST_MULTIPLE = 20_000
_PATTERNS = ("pattern", "format")
_LARGEST = 10**15
# llguidance computes multiples in 32 bits.
_WRAPS, _LEAST_EXPONENT = 1 << 32, -9


def check_costs(kind: Kind, schema: dict[str, Any], parts: Sequence[dict[str, Any]]) -> None:
    """Raise InvalidGrammar for a schema, of these parts, that is known to take long."""
    if refers_by_path(schema, parts):
        patterns = _most_of_a_value(schema, parts, _patterns)
    else:
        combined = (max(0, len(as_list(part.get("allOf"))) - 1) for part in parts)
        patterns = sum(map(_patterns, parts)) + sum(combined)
    if patterns > MOST_INTERSECTED:
        raise InvalidGrammar(kind, f"must combine at most {MOST_INTERSECTED} patterns or formats of a value")
    check_multiples(kind, [schema])


def check_multiples(kind: Kind, schemas: Sequence[dict[str, Any]]) -> None:
    """Raise InvalidGrammar for schemas of one grammar whose multiples together are known to take long."""
    if sum(map(_multiples, schemas)) > MOST_MULTIPLE:
        raise InvalidGrammar(
            kind, f"multipleOf: numbers must come to at most {MOST_MULTIPLE} together, but powers of ten"
        )


def _multiples(schema: dict[str, Any]) -> int:
    """Return a bound of the numbers whose multiples an answer may have to be, summed."""
    parts = subschemas(schema)
    numbers = [_decimal(part["multipleOf"]) for part in parts if "multipleOf" in part]
    alone = sum(_cost(*number) for number in numbers)
    if refers_by_path(schema, parts) and _most_of_a_value(schema, parts, _has_multiple) <= 1:
        return alone
    least = min((exponent for _, exponent in numbers), default=0)
    together = lcm(*(digits * 10 ** (exponent - least) for digits, exponent in numbers))
    return max(alone, _cost(together, least))


def _most_of_a_value(
    root: dict[str, Any], parts: Sequence[dict[str, Any]], count: Callable[[dict[str, Any]], int]
) -> int:
    """Return a bound of what `count` finds in the schemas that one value of an answer must satisfy.

    llguidance combines each option of anyOf and oneOf with all that stands beside them, and the properties
    of what it combines. A part that contains itself counts there with what stands beside it.
    """

    def beside(part: dict[str, Any], known: Mapping[int, int]) -> int:
        value = count(part) + sum(known.get(id(each), 0) for each in merged(root, part))
        return value + sum(max(known.get(id(each), 0) for each in some) for some in options(part))

    def in_place(part: dict[str, Any]) -> list[dict[str, Any]]:
        return [*merged(root, part), *(each for some in options(part) for each in some)]

    known: dict[int, int] = {}
    for part in _in_order(parts, in_place):
        known[id(part)] = beside(part, known)
    for part in _in_order([root], lambda part: [*merged(root, part), *children(part)]):
        below = (known.get(id(child), 0) for child in children(part))
        known[id(part)] = max([beside(part, known), *below])
    return max(known.values())


def _in_order(
    roots: Sequence[dict[str, Any]], following: Callable[[dict[str, Any]], Sequence[dict[str, Any]]]
) -> Iterator[dict[str, Any]]:
    """Yield what the roots lead to, once each, after what it leads to itself; circles end somewhere."""
    met: set[int] = set()
    rest = [(root, False) for root in roots]
    while rest:
        part, is_last = rest.pop()
        if is_last:
            yield part
        elif id(part) not in met:
            met.add(id(part))
            rest.append((part, True))
            rest += [(each, False) for each in following(part)]


def _patterns(part: dict[str, Any]) -> int:
    return sum(name in part for name in _PATTERNS)


def _has_multiple(part: dict[str, Any]) -> int:
    return "multipleOf" in part


def _decimal(value: Any) -> tuple[int, int]:
    """Return a multiple as an integer and an exponent of ten: 25 and -2 for 0.25."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _LARGEST:
        return 1, 0
    number = Decimal(str(value)).normalize()
    exponent = min(0, int(number.as_tuple().exponent))
    return int(number.scaleb(-exponent)), exponent


def _cost(digits: int, exponent: int) -> int:
    """Return about how many states a multiple takes: one for a power of ten, else as many as it counts."""
    is_power = digits == 10 ** (len(str(digits)) - 1)
    return 1 if is_power and digits < _WRAPS and exponent > _LEAST_EXPONENT else digits
