"""Names that more than one part must agree on."""

from __future__ import annotations

from pathlib import Path

# The model that is served where none is named: it comes with the installation, as a GGUF of 4 bits.
DEFAULT_MODEL = "smollm2-135m-instruct"

# Drafts that come with the installation, each in a directory called as its target.
_DRAFTS = Path(__file__).parents[3] / "services" / "draft" / "models"


def shipped_draft(model: str) -> Path | None:
    """Return the directory of the draft that was trained for the default model, if `model` names that one."""
    directory = _DRAFTS / DEFAULT_MODEL
    return directory if model in {"", DEFAULT_MODEL} and directory.is_dir() else None
