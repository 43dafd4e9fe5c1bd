"""Values of the chart in pages have keys and types of the chart's schema."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.deploy.render import CHART, default_values
from tests.repo.commands.recording import ROOT

_BLOCK = re.compile(r"^( *)```yaml\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
KNOWN = set(default_values())
SCHEMA = jsonschema.Draft7Validator(json.loads((CHART / "values.schema.json").read_text()))


def values_in(page: Path) -> list[dict[str, Any]]:
    """Return the YAML blocks of a page whose keys are all values of the chart."""
    documents = [
        yaml.safe_load("".join(line.removeprefix(match[1]) for line in match[2].splitlines(keepends=True)))
        for match in _BLOCK.finditer(page.read_text())
        if "\n---\n" not in match[2]
    ]
    return [one for one in documents if isinstance(one, dict) and set(one) <= KNOWN]


def laid_over(values: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return the values as helm merges them: a null removes a default."""
    merged = dict(values)
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = laid_over(merged[key], value)
        elif value is None:
            merged.pop(key, None)
        else:
            merged[key] = value
    return merged


CASES = [
    pytest.param(values, id=f"{page.relative_to(ROOT)}-{number}")
    for page in sorted((ROOT / "docs").rglob("*.md"))
    for number, values in enumerate(values_in(page))
]


def test_pages_show_values() -> None:
    assert len(CASES) >= 8


@pytest.mark.parametrize("values", CASES)
def test_values_of_pages_are_the_charts(values: dict[str, Any]) -> None:
    problems = [
        f"{error.json_path}: {error.message}"
        for error in SCHEMA.iter_errors(laid_over(default_values(), values))
    ]
    assert not problems


def test_other_keys_are_found() -> None:
    values = laid_over(default_values(), {"gateway": {"replica": 2}})
    assert [error.json_path for error in SCHEMA.iter_errors(values)] == ["$.gateway"]
