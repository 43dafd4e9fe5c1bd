"""Write the table of the chart's values between FILE's markers: `python -m scripts.chart_readme FILE`.

The rows are the keys of values.yaml beside FILE. A description is the comment above its key.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from scripts.between import write_between

BEGIN, END = "<!-- values: begin; written by `make chart-readme` -->\n", "<!-- values: end -->\n"
_RULER = re.compile(r"# -{3,} (.+?) -+")
_TYPES = {bool: "bool", int: "int", float: "float", str: "string", list: "list", dict: "object"}


@dataclass(frozen=True, slots=True)
class Value:
    """A key of values.yaml; `default` is None for a mapping whose keys have rows of their own."""

    path: tuple[str, ...]
    section: str
    default: str | None
    type: str
    description: str

    @property
    def key(self) -> str:
        """Return the path as `--set` takes it."""
        return ".".join(part.replace(".", "\\.") for part in self.path)

    @property
    def row(self) -> str:
        """Return the line of a Markdown table."""
        default = "" if self.default is None else f"`{self.default}`"
        description = self.description.replace("<", "&lt;")
        cells = (f"`{self.key}`", self.type, default, description)
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def values_of(text: str) -> list[Value]:
    """Return every key of a values.yaml, in its order."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        raise TypeError("values.yaml: must hold a mapping")
    return list(_values(root, text.splitlines(), ()))


def _values(node: yaml.MappingNode, lines: list[str], path: tuple[str, ...]) -> Iterator[Value]:
    for key, value in node.value:
        inner = (*path, str(key.value))
        is_nested = isinstance(value, yaml.MappingNode) and not value.flow_style
        description = _comment(lines, key.start_mark.line, key.start_mark.column)
        default = None if is_nested else _plain(value)
        text = None if is_nested else json.dumps(default, ensure_ascii=False)
        kind = "object" if is_nested else _TYPES.get(type(default), "")
        if description or not is_nested:
            yield Value(inner, _section(lines, key.start_mark.line), text, kind, description)
        if is_nested:
            yield from _values(value, lines, inner)


def _plain(node: yaml.Node) -> Any:
    return yaml.safe_load(yaml.serialize(node))


def _comment(lines: list[str], line: int, column: int) -> str:
    """Return the comment right above a key, as one line."""
    words: list[str] = []
    for above in reversed(lines[:line]):
        if not above.startswith(" " * column + "#") or _RULER.match(above):
            break
        words.insert(0, above.strip().lstrip("#").strip().removeprefix("-- "))
    return " ".join(word for word in words if word)


def _section(lines: list[str], line: int) -> str:
    rulers = (_RULER.match(above) for above in reversed(lines[:line]))
    return next((ruler[1].capitalize() for ruler in rulers if ruler), "Values")


def tables(values: list[Value]) -> Iterator[str]:
    """Yield the lines of a table for each section."""
    section = ""
    for value in values:
        if value.section != section:
            section = value.section
            yield f"\n### {section}\n"
            yield "| key | type | default | description |"
            yield "|---|---|---|---|"
        yield value.row


def main() -> None:
    """Write the tables, or exit with 1 if FILE has no markers."""
    (file,) = (Path(name) for name in sys.argv[1:])
    values = values_of((file.parent / "values.yaml").read_text(encoding="utf-8"))
    write_between(file, BEGIN, END, tables(values))


if __name__ == "__main__":
    main()
