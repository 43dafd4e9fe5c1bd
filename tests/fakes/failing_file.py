"""A file whose disk fails."""

from __future__ import annotations

FAILING = "/proc/self/mem"
"""Opening it succeeds, and reading its first byte fails with EIO."""
