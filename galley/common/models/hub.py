"""How a model of the Hugging Face hub is named: `owner/model`, or `owner/model@revision`.

A commit as the revision is what makes the files the same for ever: their owner can move a branch or a tag.
"""

from __future__ import annotations


def hub_model(spec: str) -> tuple[str, str | None]:
    """The hub's own name of a model, and the revision that is wanted, if one is."""
    name, _, revision = spec.partition("@")
    return name, revision or None
