"""The lists of mutants name code and tests that exist."""

from __future__ import annotations

import ast

import pytest

from tests.mutation.known import ROOT, Known, known_mutants
from tests.mutation.operators import mutants_of
from tests.mutation.run import EXPLAINED, explanations


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


def test_each_survivor_that_is_explained_is_a_mutant() -> None:
    explained = explanations(EXPLAINED)
    paths = {key.partition(" ")[0] for key in explained}
    mutants = {mutant.key for path in paths for mutant in mutants_of(ROOT, path)}
    assert not explained.keys() - mutants, "remove or adapt these in tests/mutation/survivors.toml"
    assert all(explained.values())
