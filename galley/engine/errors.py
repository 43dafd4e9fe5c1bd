"""Errors that only the engine raises."""

from __future__ import annotations

from galley.core.errors import CallerFault


class UnsupportedModel(CallerFault):
    """The engine does not serve this kind of model, or cannot get it; the message says why."""
