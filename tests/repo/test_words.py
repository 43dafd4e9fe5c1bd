"""scripts/words.py finds what it is for."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.words import violations


def test_each_rule_finds_its_violation(tmp_path: Path) -> None:
    core = tmp_path / "galley" / "core"
    core.mkdir(parents=True)
    (core / "a.py").write_text('"""Of the whole."""\nfrom galley.core import b\n')
    (core / "b.py").write_text(
        "from galley.core.a import x\n\ndef f(told):\n    '''See g.'''\n    self.asked = 1\n"
    )
    (core / "moves.py").write_text("")
    for number in range(13):
        (core / f"m{number}.py").write_text("")
    (tmp_path / "README.md").write_text("word " * 901)
    found = {(each.rule, each.path, each.line) for each in violations(tmp_path)}
    assert found == {
        ("first word", "galley/core/a.py", 1),
        ("import circle", "galley/core/a.py", 1),
        ("only a reference", "galley/core/b.py", 3),
        ("name", "galley/core/b.py", 3),
        ("name", "galley/core/b.py", 5),
        ("module name", "galley/core/moves.py", 1),
        ("modules a folder", "galley/core", 1),
        ("README length", "README.md", 1),
    }


@pytest.mark.parametrize(
    "text", ['"""Return the whole."""', '"""Asked twice, it fails."""', "asking = 1", "x.ask()"]
)
def test_what_is_allowed_is_not_found(tmp_path: Path, text: str) -> None:
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "a.py").write_text(text)
    (tmp_path / "README.md").write_text("short")
    assert list(violations(tmp_path)) == []
