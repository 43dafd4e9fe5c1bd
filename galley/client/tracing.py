"""The trace that a stream belongs to: that of who asked for it, in all its tries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from opentelemetry import context as current

from galley.common.tracing.telemetry import w3c_metadata
from galley.core.names import FORCE_KEY, FORCE_VALUE

_T = TypeVar("_T")


class CallerTrace:
    """As it is where this is made; a stream that breaks goes on in it, whoever reads it by then."""

    def __init__(self, *, force: bool) -> None:
        """`force` has the gateways trace the request, whatever they sample."""
        self._context = current.get_current()
        self._forced = ((FORCE_KEY, FORCE_VALUE),) if force else ()

    def call(self, make: Callable[[Sequence[tuple[str, str]] | None], _T]) -> _T:
        """What `make` returns, made there and given the metadata that says so; None where there is none."""
        token = current.attach(self._context)
        try:
            return make((*w3c_metadata(), *self._forced) or None)
        finally:
            current.detach(token)
