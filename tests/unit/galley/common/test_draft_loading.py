"""Versions of draft weights: by name, or by the content of the files that decide what is drafted."""

from __future__ import annotations

from pathlib import Path

import pytest

from galley.common.draft_loading import draft_version
from galley.core.errors import UnsupportedModel


def saved(directory: Path, **files: str) -> Path:
    directory.mkdir()
    for name, content in {"config.json": "{}", "model.safetensors": "weights", **files}.items():
        (directory / name).write_text(content)
    return directory


def test_a_version_is_that_of_the_content(tmp_path: Path) -> None:
    version = draft_version(saved(tmp_path / "a"))
    assert len(version) == 16
    assert draft_version(saved(tmp_path / "b", **{"training.json": "{}", "README.md": "#"})) == version
    others = {
        draft_version(saved(tmp_path / "c", **{"config.json": "{ }"})),
        draft_version(saved(tmp_path / "d", **{"model.safetensors": "weightS"})),
        draft_version(saved(tmp_path / "e", **{"config.json": "weights", "model.safetensors": "{}"})),
        draft_version(saved(tmp_path / "f", **{"model-2.safetensors": ""})),
    }
    assert len(others | {version}) == 5


def test_a_directory_without_weights_has_none(tmp_path: Path) -> None:
    directory = saved(tmp_path / "a")
    (directory / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match=r"must hold \*\.safetensors"):
        draft_version(directory)


def test_a_link_out_of_the_directory_is_not_read(tmp_path: Path) -> None:
    directory = saved(tmp_path / "a")
    (tmp_path / "secret").write_text("secret")
    (directory / "config.json").unlink()
    (directory / "config.json").symlink_to(tmp_path / "secret")
    with pytest.raises(UnsupportedModel, match="leads out of"):
        draft_version(directory)
