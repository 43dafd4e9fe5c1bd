"""Parse names of models of the Hugging Face hub: `owner/model`, or `owner/model@revision`.

A commit as the revision fixes the files; their owner can move a branch or a tag.
"""

from __future__ import annotations


def hub_model(spec: str) -> tuple[str, str | None]:
    """Return the hub's name of a model, and the revision if one is given."""
    name, _, revision = spec.partition("@")
    return name, revision or None
