"""Write the patterns of JSON schemas, which are of ECMA-262, for llguidance, which reads Rust's `regex`.

Validators disagree on some classes: `\\d` and `\\w` of Python have all digits and letters of Unicode. A class
becomes what all of them find in it, so that no answer fails at one of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_SPACES = r"\t-\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_ALL_SPACES = rf"{_SPACES}\x1c-\x1f\x85\ufeff"
_WORD = "0-9A-Za-z_"
_ALL_WORD = r"\p{Alphabetic}\p{M}\p{N}\p{Pc}\p{Join_Control}"
_NARROW: Mapping[str, str] = {
    "d": "0-9",
    "D": r"\P{Nd}",
    "w": _WORD,
    "W": f"[^{_ALL_WORD}]",
    "s": _SPACES,
    "S": f"[^{_ALL_SPACES}]",
}
"""What all validators find in a class."""
_WIDE: Mapping[str, str] = {
    "d": r"\p{Nd}",
    "D": "[^0-9]",
    "w": _ALL_WORD,
    "W": f"[^{_WORD}]",
    "s": _ALL_SPACES,
    "S": f"[^{_SPACES}]",
}
"""What any validator finds in a class: the rest is what all find in its complement."""
_DOT, _ANY = r"[^\n\r\u2028\u2029]", "(?s:.)"

_TOKEN = re.compile(
    r"\[(?P<no>\^?)(?P<body>(?:\\.|[^\]\\])*+)(?P<end>\]?)|\\(?P<set>[dDwWsS])|\\."
    r"|(?P<dot>\.)|\(\?(?P<flags>[a-zA-Z-]*+)(?P<scope>[:)])|(?P<group>[()])",
    re.DOTALL,
)
_ONE = r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\[xu]\{[^}]*\}|\\[^dDwWsSpPxu]|[^\\]"
_ITEM = re.compile(
    rf"(?P<low>{_ONE})-(?P<high>{_ONE})|\\(?P<set>[dDwWsS])|\\[pP](?:\{{[^}}]*\}}|.)|(?P<one>{_ONE})|\\.",
    re.DOTALL,
)
# Rust's `regex` has nested classes, intersections (&&), differences (--, ~~).
_OPERATORS = frozenset("[&-~^")


def rust_pattern(pattern: str) -> str:
    """Return a pattern of a schema as Rust's `regex` writes it. Raise ValueError for an empty class.

    What is no pattern at all is left to llguidance, which says so.
    """
    dots = [_DOT]
    """What a dot is, in each group that is open."""

    def written(found: re.Match[str]) -> str:
        if found["dot"]:
            return dots[-1]
        if found["group"] == "(" or found["scope"] == ":":
            dots.append(dots[-1])
        if found["group"] == ")" and len(dots) > 1:
            dots.pop()
        if found["flags"]:
            added, _, removed = found["flags"].partition("-")
            dots[-1] = _ANY if "s" in added else _DOT if "s" in removed else dots[-1]
        if found["set"]:
            # Case is no part of these, and to look for it takes time.
            return f"(?-i:[{_NARROW[found['set']]}])"
        return _class(found["body"], is_negated=bool(found["no"])) if found["end"] else found[0]

    return _TOKEN.sub(written, pattern)


def _class(body: str, *, is_negated: bool) -> str:
    """Return a class. In ECMA-262 it holds characters, ranges and escapes only, and `[` is a character."""
    if not body:
        raise ValueError("must not have an empty class")
    sets = {found["set"] for found in _ITEM.finditer(body)} - {None}
    if not is_negated and any(name.swapcase() in sets for name in sets):
        return _ANY
    table = _WIDE if is_negated else _NARROW

    def written(found: re.Match[str]) -> str:
        if found["low"]:
            return f"{_character(found['low'])}-{_character(found['high'])}"
        return table[found["set"]] if found["set"] else _character(found[0])

    return f"[{'^' * is_negated}{_ITEM.sub(written, body)}]"


def _character(text: str) -> str:
    return f"\\{text}" if text in _OPERATORS else text
