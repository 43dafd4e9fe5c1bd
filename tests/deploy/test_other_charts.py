"""The comparison with other charts names values that ours has."""

from __future__ import annotations

import re
from functools import reduce
from typing import Any

import pytest

from tests.deploy.render import ROOT, default_values

PAGE = ROOT / "docs" / "decisions" / "044-what-other-charts-have.md"
_ROW = re.compile(r"^\| [^|]+ \| ([^|]+) \| [^|]+ \|$", re.MULTILINE)


def named() -> list[str]:
    table = PAGE.read_text().partition("## Both have it")[2].partition("## They have it")[0]
    return sorted({value for cell in _ROW.findall(table) for value in re.findall(r"`([a-zA-Z.]+)`", cell)})


def test_the_table_names_values() -> None:
    assert len(named()) > 20


@pytest.mark.parametrize("value", named())
def test_a_value_that_the_comparison_names_is_in_the_chart(value: str) -> None:
    def below(values: Any, key: str) -> Any:
        assert key in values, f"{value}: not in values.yaml"
        return values[key]

    reduce(below, value.split("."), default_values())
