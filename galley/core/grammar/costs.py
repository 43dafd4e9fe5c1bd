"""Refuse grammars that take llguidance seconds to minutes, because its limits do not cover their work.

Patterns of one value take time exponential in their number, and a multiple time quadratic in its number.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from math import lcm
from typing import Any

from galley.core.grammar.limits import InvalidGrammar
from galley.core.grammar.spec import Kind
from galley.core.grammar.subschemas import children, merged, refers_by_path

MOST_INTERSECTED = 8
MOST_MULTIPLE = 20_000
_PATTERNS = ("pattern", "format")


def check_costs(kind: Kind, schema: dict[str, Any], parts: Sequence[dict[str, Any]]) -> None:
    """Raise InvalidGrammar for a schema, of these parts, that is known to take long."""
    is_plain = refers_by_path(schema, parts)
    patterns = _most_intersected(schema) if is_plain else sum(map(_patterns, parts))
    if patterns > MOST_INTERSECTED:
        raise InvalidGrammar(kind, f"must combine at most {MOST_INTERSECTED} patterns or formats of a value")
    numbers = [_coefficient(part["multipleOf"]) for part in parts if "multipleOf" in part]
    is_merged = not is_plain or any(merged(schema, part) for part in parts)
    if (lcm(*numbers) if is_merged else sum(numbers)) > MOST_MULTIPLE:
        raise InvalidGrammar(kind, f"multipleOf must come to at most {MOST_MULTIPLE} times a power of ten")


def _most_intersected(root: dict[str, Any]) -> int:
    """Return a bound of the patterns and formats that one string of an answer must match."""
    known: dict[int, int] = {}
    rest = [(root, False)]
    while rest:  # each schema comes twice: before those that it leads to, and after them
        part, is_last = rest.pop()
        must = merged(root, part)
        if is_last:
            alone = _patterns(part)
            below = max((known[id(child)] for child in children(part)), default=0)
            known[id(part)] = alone + max(below, sum(known[id(each)] for each in must))
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
