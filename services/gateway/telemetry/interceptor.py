"""Every call for an answer is a span: an interceptor begins it before anything else is done, and ends it.

It is the first of the gateway's own, so that a call that is refused has a span too. It costs a refused call a
few microseconds where that is not sampled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc
from opentelemetry import trace
from opentelemetry.util.types import AnyValue

from galley.common.server.interceptors import Behavior, Handler, WrappingInterceptor, wrap_handler
from galley.common.tracing.light_spans import SpanScope
from galley.common.tracing.telemetry import context_of, fail
from galley.common.wire.status import error_type
from galley.core import names
from galley.core.errors import AuthenticationUnavailable, Unauthenticated
from galley.core.session.ports import Clock
from services.gateway.telemetry.own_span import Begun
from services.gateway.telemetry.round_spans import TraceOptions
from services.gateway.telemetry.spans import RequestTrace, work_for


class RequestSpans(WrappingInterceptor):
    """Inside StatusInterceptor, before all others: what they raise is how a call ends."""

    def __init__(self, scope: SpanScope, options: TraceOptions, clock: Clock) -> None:
        """`clock` is the one that sessions run by."""
        self._scope = scope
        self._options = options
        self._clock = clock

    def wrap(self, handler: Handler, method: str) -> Handler:
        """Streams are requests; what is asked at once has gRPC's own span."""
        return wrap_handler(handler, unary=self._unary, stream=partial(self._stream, method=method))

    def _unary(self, behavior: Behavior) -> Behavior:
        async def traced(request: object, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            span = trace.get_current_span()
            work_for(self._within(span))
            try:
                return await behavior(request, context)
            except Exception as error:
                fail(span, error_type(error))
                raise

        return traced

    def _stream(self, behavior: Behavior, method: str) -> Behavior:
        async def traced(request: object, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            begun = self._begin(context, method)
            work_for(begun)
            # The generator may be left without a word when the client goes; the call's end is always told.
            context.add_done_callback(partial(_call_ended, begun))  # type: ignore[arg-type]  # the stubs want a class
            try:
                async with aclosing(behavior(request, context)) as responses:
                    async for response in responses:
                        yield response
            except grpc.aio.AbortError:  # whoever aborted has told why
                raise
            except (Unauthenticated, AuthenticationUnavailable) as error:
                begun.failed(error)
                begun.disown()
                raise
            except Exception as error:
                begun.failed(error)
                raise
            except asyncio.CancelledError:
                begun.ended(_why_cancelled(context))
                raise
            begun.ended(grpc.StatusCode.OK)

        return traced

    def _begin(self, context: grpc.aio.ServicerContext[Any, Any], method: str) -> RequestTrace:
        metadata = {
            name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)
        }
        service, _, rpc = method.strip("/").partition("/")
        attributes: dict[str, AnyValue] = {
            names.OPERATION: names.TEXT_COMPLETION,
            names.PROVIDER: names.GALLEY,
            names.REQUEST_STREAM: True,
            names.RPC_SYSTEM: "grpc",
            names.RPC_SERVICE: service,
            names.RPC_METHOD: rpc,
        }
        if metadata.get(names.FORCE_KEY) == names.FORCE_VALUE:
            attributes[names.FORCED] = True
        caller = context_of(metadata)
        parent = trace.get_current_span(caller).get_span_context()
        own = self._scope.request(caller, names.TEXT_COMPLETION, attributes)
        request = RequestTrace(self._begun(own, parent if parent.is_valid else None, attributes))
        request.begin()
        return request

    def _within(self, span: trace.Span) -> RequestTrace:
        request = RequestTrace(self._begun(span.get_span_context(), None, {}))
        request.adopt(span)
        return request

    def _begun(
        self, context: trace.SpanContext, parent: trace.SpanContext | None, attributes: dict[str, AnyValue]
    ) -> Begun:
        start_ns = time.time_ns()
        offset_ns = start_ns - self._clock.now_ns()
        return Begun(
            self._scope, self._options, context, parent, self._clock, offset_ns, start_ns, attributes
        )


def _call_ended(begun: RequestTrace, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    begun.ended(_why_cancelled(context))  # unless it has come to an end of its own
    begun.release()


def _why_cancelled(context: grpc.aio.ServicerContext[Any, Any]) -> grpc.StatusCode:
    """The client went, or its deadline came."""
    remaining_s: Any = context.time_remaining()
    late = remaining_s is not None and remaining_s <= 0
    return grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
