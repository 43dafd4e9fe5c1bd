"""Tell whether the schemas of a oneOf exclude each other, where llguidance does not follow references."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from galley.core.grammar.schemas.subschemas import as_dict, as_list, target

# All pairs of them are compared.
_MOST_SCHEMAS = 64


class _Values:
    """The values of a schema, as far as they are known."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self.types = set(_types(schema))
        self.strings = _strings(schema)
        self.required: dict[str, Any] = {}
        """The required properties of an object that have schemas."""
        if schema.get("type") == "object":
            properties = as_dict(schema.get("properties"))
            names = [name for name in as_list(schema.get("required")) if isinstance(name, str)]
            self.required = {name: properties[name] for name in names if name in properties}


class Unions:
    """The schemas of one root, all of whose references must be paths from it."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._unknown = _Values({})
        self._values: dict[int, _Values] = {}
        self._compared: dict[tuple[_Values, _Values], bool] = {}

    def are_exclusive(self, schemas: list[Any]) -> bool:
        """Return True if no value fits two of these schemas: by their types, or by a required property.

        Such a property has other strings as its constants in each, or other types. False for many schemas.
        """
        if len(schemas) > _MOST_SCHEMAS:
            return False
        pairs = combinations([self._values_of(each) for each in schemas], 2)
        return all(self._are_apart(*pair) or self._differ_in_a_property(*pair) for pair in pairs)

    def _values_of(self, schema: Any) -> _Values:
        """Return those of what a schema is or refers to: what stands beside a reference excludes more."""
        passed: list[int] = []
        while isinstance(schema, dict) and id(schema) not in self._values:
            passed.append(id(schema))
            is_last = "$ref" not in schema
            # A reference in a circle leads to nothing that is known.
            self._values[id(schema)] = _Values(schema) if is_last else self._unknown
            schema = schema if is_last else target(self._root, schema["$ref"])
        values = self._values[id(schema)] if isinstance(schema, dict) else self._unknown
        self._values |= dict.fromkeys(passed, values)
        return values

    def _differ_in_a_property(self, one: _Values, other: _Values) -> bool:
        return one is not other and any(
            self._are_apart(self._values_of(schema), self._values_of(other.required[name]))
            for name, schema in one.required.items()
            if name in other.required
        )

    def _are_apart(self, one: _Values, other: _Values) -> bool:
        pair = one, other
        if pair not in self._compared:
            self._compared[pair] = _is_apart(one.types, other.types) or _is_apart(one.strings, other.strings)
        return self._compared[pair]


def _is_apart(one: set[str], other: set[str]) -> bool:
    return bool(one) and bool(other) and one.isdisjoint(other)


def _types(schema: dict[str, Any]) -> Iterator[str]:
    """Yield the types of a schema; none if it names none."""
    named = schema.get("type")
    for each in as_list(named) or [named]:
        if isinstance(each, str):
            # An integer is a number.
            yield "number" if each == "integer" else each


def _strings(schema: dict[str, Any]) -> set[str]:
    """Return the constants of a schema if all are strings."""
    values = [schema["const"]] if "const" in schema else as_list(schema.get("enum"))
    return set(values) if all(isinstance(each, str) for each in values) else set()
