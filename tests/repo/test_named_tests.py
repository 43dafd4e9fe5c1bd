"""Each claim of docs/security.md and each promise of docs/guarantees.md names tests that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
_TABLES = {"security.md": "| claim | tests |", "guarantees.md": "| promise | holds under | would fail |"}
_NAMED = re.compile(r"`([^`]+)`")


def rows(page: str) -> Iterator[tuple[str, str]]:
    """Yield the first and the last cell of each row that names tests."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for table in text.split(_TABLES[page])[1:]:
        for line in table.partition("\n\n")[0].splitlines()[2:]:
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            if proof := cells[-1].strip(" |"):
                yield cells[0], proof


def _pairs(proof: str) -> list[tuple[str, str]]:
    pairs, file = [], ""
    for word in _NAMED.findall(proof):
        if word.endswith(".py"):
            file = word
        elif not word.startswith("make "):
            pairs.append((file, word))
    return pairs


@cache
def functions_of(file: str) -> frozenset[str]:
    path = TESTS / file
    if not path.is_file():
        return frozenset()
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return frozenset(one.name for one in body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize(("claim", "proof"), [row for page in _TABLES for row in rows(page)])
def test_a_claim_is_proven_by_tests_that_exist(claim: str, proof: str) -> None:
    pairs = _pairs(proof)
    assert pairs, claim
    missing = [f"{file}::{name}" for file, name in pairs if name not in functions_of(file)]
    assert not missing
