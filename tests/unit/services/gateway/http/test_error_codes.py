"""The codes of errors over HTTP are those that docs/http.md lists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import grpc

import services.gateway.http.app

SOURCES = Path(services.gateway.http.app.__file__).parent
PAGE = Path(__file__).resolve().parents[5] / "docs" / "http.md"
PLACES = {"Refused": 1, "ErrorReply": 2}
"""The place of the code among the arguments."""


def written_codes() -> Iterator[str]:
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Name(id=name), args=args) if len(args) > PLACES.get(name, len(args)):
                    code: ast.expr = args[PLACES[name]]
                case ast.Assign(
                    targets=[ast.Tuple(elts=[_, ast.Name(id="code")])], value=ast.Tuple(elts=elts)
                ):
                    code = elts[1]
                case _:
                    continue
            if isinstance(code, ast.Constant):
                yield str(code.value)


def test_the_documented_codes_are_those_of_the_code() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Errors")[2]
    documented = set(re.findall(r"^\| `([a-z_]+)` \|", section, re.MULTILINE))
    assert documented == set(written_codes()) - {code.name.lower() for code in grpc.StatusCode}
