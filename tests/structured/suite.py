"""Schemas with instances that must pass and fail, and schemas that must be refused.

`schemas/` holds our own set, one schema a line; `json_schema_test_suite/` the cases of others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema_rs

_HERE = Path(__file__).parent
_SHAPES = ('"format": "date', '"format": "time"', '"format": "email"')
"""Grammars know no calendar, and not how long a part of an e-mail address may be."""


@dataclass(frozen=True, slots=True)
class SchemaCase:
    """A schema and texts of instances; of `valid` and `invalid` ones, each is one line as models write it."""

    group: str
    name: str
    schema: Any
    valid: tuple[str, ...] = ()
    invalid: tuple[str, ...] = ()
    refused: str | None = None
    """What the refusal must name; None if the schema must be taken."""

    @property
    def text(self) -> str:
        return json.dumps(self.schema, ensure_ascii=False)

    def __str__(self) -> str:
        return f"{self.group}: {self.name}"

    def checker(self, *, shapes_only: bool = True) -> Callable[[str], bool]:
        """Return a function that says whether a text is a valid instance, by a validator of others.

        With `shapes_only`, formats of which grammars keep only the shape are not checked.
        """
        validator = jsonschema_rs.validator_for(
            self.schema, validate_formats=not (shapes_only and any(name in self.text for name in _SHAPES))
        )
        return lambda text: validator.is_valid(json.loads(text, parse_float=_finite))


def own_cases() -> list[SchemaCase]:
    """Return our own set: the schemas to be taken, then those to be refused."""
    paths = sorted((_HERE / "schemas").glob("*.jsonl"))
    cases = [_own_case(path.stem, line) for path in paths for line in _lines(path)]
    return sorted(cases, key=lambda case: case.refused is not None)


def taken_cases() -> list[SchemaCase]:
    return [case for case in own_cases() if case.refused is None]


def refused_cases() -> list[SchemaCase]:
    return [case for case in own_cases() if case.refused is not None]


def suite_cases() -> list[SchemaCase]:
    """Return the cases of the JSON-Schema-Test-Suite that the grammars claim."""
    return [_suite_case(line) for line in _lines(_HERE / "json_schema_test_suite" / "draft2020-12.jsonl")]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def _own_case(group: str, line: dict[str, Any]) -> SchemaCase:
    return SchemaCase(
        group,
        line["name"],
        line["schema"],
        tuple(map(written, line.get("valid", ()))),
        (*map(written, line.get("invalid", ())), *line.get("invalid_text", ())),
        line.get("refused"),
    )


def _suite_case(line: dict[str, Any]) -> SchemaCase:
    tests = line["tests"]
    return SchemaCase(
        line["file"],
        line["description"],
        line["schema"],
        tuple(written(test["data"]) for test in tests if test["valid"]),
        tuple(written(test["data"]) for test in tests if not test["valid"]),
    )


def _finite(number: str) -> float:
    """Return the nearest float: 1e999 is a number."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(number)))


def written(instance: Any) -> str:
    """Return the text of an instance in the form that grammars have answers take."""
    return json.dumps(instance, ensure_ascii=False)
