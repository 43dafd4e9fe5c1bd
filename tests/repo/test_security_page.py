"""docs/security.md: each claim is proven by tests that exist by the names given there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
_NAMED = re.compile(r"`([^`]+)`")


def claims() -> dict[str, list[tuple[str, str]]]:
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    table = page.partition("| claim | tests |\n|---|---|\n")[2]
    result = {}
    for line in table.splitlines():
        claim, proof = (cell.strip() for cell in line.strip("|").split(" | ", 1))
        if proof.strip(" |"):
            result[claim] = _pairs(proof)
    return result


def _pairs(proof: str) -> list[tuple[str, str]]:
    pairs, file = [], ""
    for word in _NAMED.findall(proof):
        if word.endswith(".py"):
            file = word
        else:
            pairs.append((file, word))
    return pairs


@cache
def functions_of(file: str) -> frozenset[str]:
    path = TESTS / file
    if not path.is_file():
        return frozenset()
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return frozenset(one.name for one in body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("claim", claims())
def test_a_claim_is_proven_by_tests_that_exist(claim: str) -> None:
    pairs = claims()[claim]
    assert pairs
    missing = [f"{file}::{name}" for file, name in pairs if name not in functions_of(file)]
    assert not missing
