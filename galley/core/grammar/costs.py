"""Refuse grammars that take llguidance seconds to minutes, because its limits do not cover their work.

Patterns of one value take time exponential in their number, and a multiple time quadratic in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from math import lcm
from typing import Any

from galley.core.grammar.limits import InvalidGrammar
from galley.core.grammar.spec import Kind
from galley.core.grammar.subschemas import (
    children,
    merged,
    options,
    refers_by_path,
    subschemas,
)

MOST_INTERSECTED = 8
MOST_MULTIPLE = 20_000
_PATTERNS = ("pattern", "format")


def check_costs(kind: Kind, schema: dict[str, Any], parts: Sequence[dict[str, Any]]) -> None:
    """Raise InvalidGrammar for a schema, of these parts, that is known to take long."""
    is_plain = refers_by_path(schema, parts)
    patterns = _most_intersected(schema) if is_plain else sum(map(_patterns, parts))
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
    numbers = [_coefficient(part["multipleOf"]) for part in parts if "multipleOf" in part]
    are_apart = refers_by_path(schema, parts) and not any(
        merged(schema, part) or options(part) for part in parts
    )
    return sum(numbers) if are_apart else max(sum(numbers), lcm(*numbers))


def _most_intersected(root: dict[str, Any]) -> int:
    """Return a bound of the patterns and formats that one string of an answer must match."""
    known: dict[int, int] = {}
    rest = [(root, False)]
    while rest:  # each schema comes twice: before those that it leads to, and after them
        part, is_last = rest.pop()
        must = merged(root, part)
        if is_last:
            # llguidance combines each option of anyOf and oneOf with all that stands beside them.
            one_of_each = sum(max(known[id(each)] for each in some) for some in options(part))
            value = _patterns(part) + sum(known[id(each)] for each in must) + one_of_each
            known[id(part)] = max([value, *(known[id(child)] for child in children(part))])
        elif id(part) not in known:
            known[id(part)] = 0
            rest.append((part, True))
            rest += [(each, False) for each in (*must, *children(part))]
    return known[id(root)]


def _patterns(part: dict[str, Any]) -> int:
    return sum(name in part for name in _PATTERNS)


def _coefficient(value: Any) -> int:
    """Return a multiple without its power of ten: 25 for 0.25, and 1 for 100."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        return 1
    return int("".join(map(str, Decimal(str(value)).normalize().as_tuple().digits)))
