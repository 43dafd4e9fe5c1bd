"""Turn errors of a servicer into statuses, and bound the standard calls, which are open to every caller."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import grpc

from galley.common.logs import get_logger, log_internal
from galley.common.wire.handlers import Context, Handler, WrappingInterceptor, run_within
from galley.common.wire.status import abort
from galley.core.errors import GalleyError, Overloaded

MAX_OPEN_CALLS = 128
"""Calls of one standard method that may be open at once."""
_RETRY_AFTER_S = 1.0

_LOG = get_logger(__name__)

# Raised by a servicer's own abort, and where a response cannot be sent because the caller has gone.
_GRPC_ERRORS = (grpc.aio.AbortError, grpc.aio.InternalError)


class StatusInterceptor(WrappingInterceptor):
    """An interceptor that turns errors of servicers into statuses, but not cancellation and gRPC's own."""

    includes_standard = True

    def wrap(self, handler: Handler, method: str) -> Handler:  # noqa: ARG002  # the same for all
        return run_within(handler, _guard)


@asynccontextmanager
async def _guard(context: Context) -> AsyncIterator[None]:
    try:
        yield
    except _GRPC_ERRORS:
        raise
    except Exception as error:  # noqa: BLE001  # the outermost guard of a call
        log_internal(error)
        if isinstance(error, GalleyError) and error.public_message != str(error):
            _LOG.warning("call failed", error=str(error))
        await abort(context, error)


class StandardCallsInterceptor(WrappingInterceptor):
    """A bound of open calls for each method of health and reflection; place it inside StatusInterceptor."""

    includes_standard = True

    def __init__(self, max_open: int = MAX_OPEN_CALLS) -> None:
        self._max_open = max_open
        self._open: Counter[str] = Counter()

    def wrap(self, handler: Handler, method: str) -> Handler:
        return run_within(handler, partial(self._count, method)) if method.startswith("/grpc.") else handler

    @asynccontextmanager
    async def _count(self, method: str, _: Context) -> AsyncIterator[None]:
        if self._open[method] >= self._max_open:
            raise Overloaded(f"{method}: all {self._max_open} allowed calls are open", _RETRY_AFTER_S)
        self._open[method] += 1
        try:
            yield
        finally:
            self._open[method] -= 1
