"""A configuration file: TOML with one table a command and one key a flag, spelled as it is without `--`."""

from __future__ import annotations

import difflib
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from galley.common.regular_file import read_regular

_MAX_BYTES = 1 << 20
_COMMANDS = (
    "audit bench chat check completion demo distill draft drafts gateway generate logs plan prepare ps "
    "resume stop target top trace up"
)
TABLES = frozenset(_COMMANDS.split())
"""The commands: each has a table, also in a file that a service reads. `serve` has that of `up`."""


class CountOrAuto(int):
    """The type of a flag that takes a whole number or the word auto."""


_KINDS: Mapping[type, str] = {
    bool: "true or false",
    int: "a whole number",
    CountOrAuto: 'a whole number or "auto"',
    float: "a number",
    list: "a list of texts",
    str: "text",
}


@dataclass(frozen=True, slots=True)
class ConfigFile:
    path: Path
    text: str
    tables: Mapping[str, Mapping[str, Any]]

    def place(self, table: str, key: str = "") -> str:
        """Return `file:line: table.key` of a key, or of a table."""
        name = f"{table}.{key}" if key else table
        return f"{self.path}:{self._line(table, key)}: {name}"

    def _line(self, table: str, key: str) -> int:
        """Return the line at which the key first stands: TOML's parser reports none."""
        lines = self.text.splitlines(keepends=True)
        begin = 1
        for number in range(1, len(lines) + 1):
            try:
                parsed = tomllib.loads("".join(lines[:number]))
            except tomllib.TOMLDecodeError:  # within a value of several lines
                continue
            if table in parsed and (not key or key in parsed[table]):
                return begin
            begin = number + 1
        return begin

    def check_tables(self) -> None:
        """Raise ValueError for a table of no command."""
        for table in self.tables:
            _check_known(self.place(table), table, TABLES)

    def values(self, table: str, kinds: Mapping[str, type]) -> Mapping[str, Any]:
        """Return the keys of a table. Raise ValueError for an unknown key or a value of another kind.

        Its text leaves the value out: it may be a secret.
        """
        values = self.tables.get(table, {})
        for key, value in values.items():
            place = self.place(table, key)
            _check_known(place, key, kinds)
            if not _is_kind(value, kinds[key]):
                raise ValueError(f"{place}: must be {_KINDS[kinds[key]]}, got {_kind(value)}")
        return values


def read_config(path: Path) -> ConfigFile:
    """Read a file. Raise ValueError, which names the file, unless it is regular and holds tables in TOML."""
    try:
        content = read_regular(path, _MAX_BYTES)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    try:
        text = content.decode()
        tables = tomllib.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: must be TOML: {error}") from None
    file = ConfigFile(path, text, tables)
    if loose := [name for name, value in tables.items() if not isinstance(value, dict)]:
        raise ValueError(f"{file.place(loose[0])}: must be in the table of a command, such as [up]")
    return file


def kind_of(annotation: Any) -> type:
    """Return what TOML must hold for a flag of this type: bool, int, float, list or str."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return kind_of(arguments[0])
    if origin in {typing.Union, types.UnionType}:
        return kind_of(next(each for each in arguments if each is not type(None)))
    kind = origin or annotation
    return kind if kind in _KINDS else str


def _check_known(place: str, name: str, known: Iterable[str]) -> None:
    if name not in (names := sorted(known)):
        nearest = difflib.get_close_matches(name, names, 1)
        raise ValueError(f"{place}: unknown" + (f"; did you mean {nearest[0]}?" if nearest else ""))


def _kind(value: object) -> str:
    return _KINDS.get(type(value), "a table" if isinstance(value, dict) else "a date or time")


def _is_kind(value: object, kind: type) -> bool:
    if kind is list:
        return isinstance(value, list) and all(isinstance(each, str) for each in value)
    if kind is CountOrAuto:
        return value == "auto" or _is_kind(value, int)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)
