"""The lists of mutants name code and tests that exist."""

from __future__ import annotations

import ast

import pytest

from tests.mutation.known import ROOT, Known, known_mutants


@pytest.mark.parametrize("mutant", known_mutants(), ids=lambda mutant: mutant.name)
def test_a_known_mutant_changes_one_place_and_its_test_exists(mutant: Known) -> None:
    assert (ROOT / mutant.file).read_text().count(mutant.text) == 1, (
        "adapt `text` in tests/mutation/known.toml"
    )
    assert mutant.replacement != mutant.text
    path, _, name = mutant.test.partition("::")
    tests = ast.walk(ast.parse((ROOT / path).read_text()))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    assert any(isinstance(test, functions) and test.name == name for test in tests)
