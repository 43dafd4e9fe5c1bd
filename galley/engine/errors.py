"""What only the engine can find wrong."""

from __future__ import annotations

from galley.core.errors import CallerFault


class UnsupportedModel(CallerFault):
    """The model is of a kind that this engine does not serve, or cannot be had; the message says why."""
