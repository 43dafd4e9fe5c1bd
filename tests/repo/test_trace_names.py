"""The page about telemetry names everything that traces hold, and nothing else of ours."""

from __future__ import annotations

import re
from pathlib import Path

from galley.core import trace_names

PAGE = Path(__file__).resolve().parents[2] / "docs" / "observe" / "telemetry.md"


def told() -> str:
    """The part about traces."""
    parts = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    [traces] = [part for part in parts if part.startswith("Traces")]
    return traces


def named() -> dict[str, str]:
    return {
        name: value for name, value in vars(trace_names).items() if name.isupper() and isinstance(value, str)
    }


def test_the_page_names_every_span_attribute_and_event() -> None:
    text = told()
    assert [value for value in named().values() if value not in text] == []


def test_what_the_page_names_is_in_the_code() -> None:
    """Of our own: `galley.` and the events, which stand in code quotes."""
    quoted = set(re.findall(r"`(galley\.[a-z_.]+)`", told()))
    assert quoted - set(named().values()) == set()
