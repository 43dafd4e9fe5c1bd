"""Say which parameter of a request is not as the API describes it, and how it must be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from galley.common.constraints import constraint_of

# What pydantic puts into the place of a problem besides the names of parameters.
_KINDS = re.compile(
    r"body|query|path|header|str|int|bool|(list|dict|literal|function-\w+)\[.*|(Flat)?NamedTool", re.DOTALL
)

Problem = dict[str, Any]


def first_mismatch(problems: Sequence[Problem]) -> tuple[str, str]:
    """Return the first parameter of `problems`, which are pydantic's, empty for the body, and how it must be.

    Each type of a union has a problem of its own. Those of the type that takes the most of the value count.
    """
    branches = _branches(problems)
    furthest = max(branches, key=_progress)
    place = _place(furthest)
    musts = dict.fromkeys(constraint_of(one) for one in branches if _place(one) == place)
    first, *others = [constraint_of(furthest)] if furthest["type"] == "too_long" else musts
    return _name(place), " or ".join([first, *(other.removeprefix("must be ") for other in others)])


def _branches(problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems of the first parameter: several if it is a union."""
    place = problems[0]["loc"]
    end = next((at for at, part in enumerate(place) if at and _is_kind(part)), len(place))
    return [one for one in problems if one["loc"][:end] == place[:end]]


def _progress(problem: Problem) -> tuple[bool, list[int]]:
    """Order problems by how much of the value comes before them; a list is too long after all its entries."""
    steps = [part if isinstance(part, int) else 0 for part in _place(problem)]
    return problem["type"] == "too_long", steps


def _place(problem: Problem) -> list[str | int]:
    return [part for part in problem["loc"] if not _is_kind(part)]


def _is_kind(part: str | int) -> bool:
    return isinstance(part, str) and _KINDS.fullmatch(part) is not None


def _name(place: Sequence[str | int]) -> str:
    return "".join(
        f"[{part}]" if isinstance(part, int) else f".{printable_name(part)}" for part in place
    ).lstrip(".")


def printable_name(name: str) -> str:
    """Return the name of a parameter, which may be any text of the caller, as far as it is printed."""
    return re.sub(r"[^A-Za-z0-9_.\[\]-]", "?", name[:64])
