"""Refuse grammars that take llguidance seconds to minutes, because its limits do not cover their work.

Patterns of one value take time exponential in their number, and a multiple time quadratic in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from math import lcm
from typing import Any

from galley.core.grammar.limits import InvalidGrammar
from galley.core.grammar.spec import Kind
from galley.core.grammar.subschemas import (
    as_list,
    children,
    merged,
    options,
    refers_by_path,
    subschemas,
)

MOST_INTERSECTED = 8
MOST_MULTIPLE = 20_000
_PATTERNS = ("pattern", "format")
_LARGEST = 10**15
# llguidance computes multiples in 32 bits.
_WRAPS, _LEAST_EXPONENT = 1 << 32, -9


def check_costs(kind: Kind, schema: dict[str, Any], parts: Sequence[dict[str, Any]]) -> None:
    """Raise InvalidGrammar for a schema, of these parts, that is known to take long."""
    if refers_by_path(schema, parts):
        patterns = _most_intersected(schema, parts)
    else:
        patterns = sum(_patterns(part) + _choices(part) for part in parts)
    if patterns > MOST_INTERSECTED:
        raise InvalidGrammar(kind, f"must combine at most {MOST_INTERSECTED} patterns or formats of a value")
    check_multiples(kind, [schema])


def check_multiples(kind: Kind, schemas: Sequence[dict[str, Any]]) -> None:
    """Raise InvalidGrammar for schemas of one grammar whose multiples together are known to take long."""
    if sum(map(_multiples, schemas)) > MOST_MULTIPLE:
        raise InvalidGrammar(kind, f"multipleOf must come to at most {MOST_MULTIPLE} times a power of ten")


def _multiples(schema: dict[str, Any]) -> int:
    """Return a bound of the numbers whose multiples an answer may have to be, summed."""
    parts = subschemas(schema)
    numbers = [_decimal(part["multipleOf"]) for part in parts if "multipleOf" in part]
    are_apart = refers_by_path(schema, parts) and not any(
        merged(schema, part) or options(part) for part in parts
    )
    alone = sum(_cost(*number) for number in numbers)
    least = min((exponent for _, exponent in numbers), default=0)
    together = lcm(*(digits * 10 ** (exponent - least) for digits, exponent in numbers))
    return alone if are_apart else max(alone, _cost(together, least))


def _most_intersected(root: dict[str, Any], parts: Sequence[dict[str, Any]]) -> int:
    """Return a bound of the patterns and formats that one string of an answer must match."""
    known: dict[int, int] = {}
    rest = [(root, False)]
    while rest:  # each schema comes twice: before those that it leads to, and after them
        part, is_last = rest.pop()
        if is_last:
            known[id(part)] = _combined(root, part, known)
        elif id(part) not in known:
            known[id(part)] = 0
            rest.append((part, True))
            rest += [(each, False) for each in (*merged(root, part), *children(part))]
    once = max(known.values())
    # Parts that contain themselves have been counted once. They may hold what is combined each time.
    is_changed = True
    while is_changed and max(known.values()) <= MOST_INTERSECTED:
        grown = {id(part): _combined(root, part, known) for part in parts}
        is_changed, known = grown != known, grown
    most = max(known.values())
    return most if most <= MOST_INTERSECTED else max(once, sum(map(_patterns, parts)))


def _combined(root: dict[str, Any], part: dict[str, Any], known: Mapping[int, int]) -> int:
    """Return the patterns of a part with those beside it, or of one below it if these are more.

    llguidance combines each option of anyOf and oneOf with all that stands beside them.
    """
    value = _patterns(part) + sum(known[id(each)] for each in merged(root, part))
    value += sum(max(known[id(each)] for each in some) for some in options(part))
    return max([value, *(known[id(child)] for child in children(part))])


def _choices(part: dict[str, Any]) -> int:
    """Return how many schemas more than one of each kind are combined."""
    return sum(max(0, len(as_list(part.get(name))) - 1) for name in ("allOf", "anyOf", "oneOf"))


def _patterns(part: dict[str, Any]) -> int:
    return sum(name in part for name in _PATTERNS)


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
