"""docs/observe/spans.md names every span, attribute and event in the code, and no others."""

from __future__ import annotations

import re
from pathlib import Path

from galley.core import names

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "observe" / "spans.md").read_text(encoding="utf-8")
NAMES = {value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)}


def test_page_names_every_span_attribute_and_event() -> None:
    assert [name for name in NAMES if name not in PAGE] == []


def test_page_names_no_other_attribute() -> None:
    assert set(re.findall(r"`(galley\.[a-z_.]+)`", PAGE)) - NAMES == set()
