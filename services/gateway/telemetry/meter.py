"""What the gateway's parts tell of what they do, for metrics. These count nothing: see `metrics.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.trace import SpanContext

from galley.core.answer.answer import Chunk, NumericsChanged, SessionSpec
from galley.core.errors import GalleyError
from galley.core.session.events import RoundEnded
from galley.core.session.stats import SpeculationStats


class StreamMeter:
    """Hears of one session while it runs; `stalled_ns` is how long its client has kept it waiting in all."""

    stalled_ns = 0

    def traced(self, span: SpanContext) -> None:
        """What is observed from now on belongs to this span."""

    def round(self, done: RoundEnded) -> None:
        """A round is over."""

    def missed(self, pool: str) -> None:
        """A replica did not hold what it was thought to."""

    def retried(self) -> None:
        """A call to the store is repeated."""

    def committed(self, took_ns: int, error: GalleyError | None) -> None:
        """A commit came back, or came to nothing."""

    def stalled(self, waited_ns: int) -> None:
        """So long what was ready to be sent was not taken."""

    def ended(self, stats: SpeculationStats) -> None:
        """The session runs no more, here."""


class CallMeter:
    """Hears of one call of Generate or Resume."""

    def traced(self, span: SpanContext) -> None:
        """The call's own span, before it has a session; what is observed of that belongs to it, too."""

    def began(self, stream: StreamMeter, *, is_new: bool, operation: str) -> None:
        """It has a session, which is new or goes on; `operation` is what the session was begun as."""

    def sends(self, item: Chunk | NumericsChanged) -> None:
        """Something is handed over."""

    def failed(self, error: BaseException) -> None:
        """How it ends, however its handler is ended."""


class GatewayMeter:
    """Of one gateway."""

    @contextmanager
    def call(
        self,
        context: grpc.aio.ServicerContext[Any, Any],
        *,
        operation: str,
        model: str | None,
    ) -> Iterator[CallMeter]:
        """Within, a call is served; `model` is the one asked for, None where a session is resumed."""
        del context, operation, model
        yield CallMeter()

    def stream(self, spec: SessionSpec) -> StreamMeter:
        """Of a session that is to run here."""
        del spec
        return StreamMeter()

    def refused(self, reason: str) -> None:
        """A call was not admitted."""

    def retried(self) -> None:
        """A call to the store is repeated."""
