"""The order in which test files begin."""

from __future__ import annotations

from pathlib import Path

from tests.plugins.order import SLOW, in_order

ROOT = Path(__file__).parents[2]


def test_the_slow_files_exist() -> None:
    assert [file for file in SLOW if not (ROOT / file).is_file()] == []


def test_slow_files_come_first_then_those_with_most_tests() -> None:
    slow, slower = SLOW[1], SLOW[0]
    keys = in_order(["a", "b", "b", slow, "c", slower, slow])
    assert sorted(keys, key=keys.__getitem__) == [slower, slow, "b", "a", "c"]
