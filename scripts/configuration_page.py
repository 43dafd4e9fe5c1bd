"""Write the tables of settings between FILE's markers: `python -m scripts.configuration_page FILE`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from scripts.between import write_between
from scripts.chart_schema import ROLES, settings_of

BEGIN, END = "<!-- settings: begin; written by `make configuration` -->\n", "<!-- settings: end -->\n"
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
_KINDS = {"boolean": "on or off", "integer": "integer", "number": "number"}
Field = Mapping[str, Any]


def main() -> None:
    """Write the tables, or exit with 1 if FILE has no markers."""
    write_between(Path(sys.argv[1]), BEGIN, END, _tables())


def _tables() -> Iterator[str]:
    roles = {role: _fields_of(role) for role in ROLES}
    first, *others = roles.values()
    shared = {
        name: field for name, field in first.items() if all(fields.get(name) == field for fields in others)
    }
    yield from _table("All services", shared)
    for role, fields in roles.items():
        yield from _table(role.capitalize(), {name: fields[name] for name in fields.keys() - shared.keys()})


def _fields_of(role: str) -> dict[str, Field]:
    model = settings_of(role)
    fields: dict[str, dict[str, Any]] = model.model_json_schema()["properties"]
    for name, field in model.model_fields.items():
        if isinstance(field.default, SecretStr):  # masked in the schema; a default is no secret
            fields[name]["default"] = field.default.get_secret_value()
    return dict(fields)


def _table(title: str, fields: Mapping[str, Field]) -> Iterator[str]:
    yield f"\n## {title}\n"
    yield "| flag | default | values | what it sets |"
    yield "|---|---|---|---|"
    for name, field in sorted(fields.items()):
        flag = name.replace("_", "-")
        yield f"| `--{flag}` | {_default(field)} | {_values(field)} | {field['description']} |"


def _default(field: Field) -> str:
    match field.get("default"):
        case None | "" | []:
            return "none"
        case bool(value):
            return "on" if value else "off"
        case int(value) | float(value):
            return f"`{_number(value)}`"
        case value:
            return f"`{value}`"


def _values(field: Field) -> str:
    """Return the choices, or the type and its bounds."""
    value = next(kind for kind in field.get("anyOf", [field]) if kind.get("type") != "null")
    if "enum" in value:
        return ", ".join(f"`{choice}`" for choice in value["enum"])
    bounds = [f"{sign} {_number(value[key])}" for key, sign in _BOUNDS.items() if key in value]
    return " ".join([_KINDS.get(value.get("type", ""), "text"), ", ".join(bounds)]).strip()


def _number(value: float) -> str:
    return f"{value:g}" if value != int(value) else str(int(value))


if __name__ == "__main__":
    main()
