"""Start and end the span of each stream's call, also of calls that are rejected."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import grpc
from opentelemetry import trace
from opentelemetry.util.types import AnyValue

from galley.common.tracing.light_spans import SpanScope
from galley.common.tracing.telemetry import context_of, fail
from galley.common.wire.handlers import Context, Handler, WrappingInterceptor, run_within, text_metadata
from galley.common.wire.status import error_type
from galley.core import names
from galley.core.errors import AuthenticationUnavailable, Unauthenticated
from galley.core.session.events import Clock
from services.gateway.client_call import ClientCall, client_call, once
from services.gateway.telemetry.call import Failure, failure_of
from services.gateway.telemetry.observer import RequestObserver, observe_with
from services.gateway.telemetry.spans import TraceOptions, TraceStart


class TraceInterceptor(WrappingInterceptor):
    """Trace calls. Runs inside StatusInterceptor and outside all others, so that it sees their errors."""

    def __init__(self, tracer: RequestTracer) -> None:
        self._tracer = tracer

    def wrap(self, handler: Handler, method: str) -> Handler:
        """Trace streams as requests; unary calls have gRPC's own span."""
        return run_within(
            handler, partial(self._trace_stream, method) if handler.response_streaming else self._trace_unary
        )

    def _trace_stream(self, method: str, context: Context) -> AbstractAsyncContextManager[None]:
        service, _, rpc = method.strip("/").partition("/")
        attributes = {names.RPC_SYSTEM: "grpc", names.RPC_SERVICE: service, names.RPC_METHOD: rpc}
        return self._tracer.stream(client_call(context), attributes)

    def _trace_unary(self, _: Context) -> AbstractAsyncContextManager[None]:
        return self._tracer.unary()


class RequestTracer:
    """Trace the calls of either protocol."""

    def __init__(self, scope: SpanScope, options: TraceOptions, clock: Clock) -> None:
        self._scope = scope
        self._options = options
        self._clock = clock

    @asynccontextmanager
    async def unary(self) -> AsyncIterator[None]:
        """Let a call record its calls below the current span."""
        span = trace.get_current_span()
        observer = RequestObserver(self._start(span.get_span_context(), None, {}, {}))
        observer.adopt(span)
        observe_with(observer)
        try:
            yield
        except Exception as error:
            fail(span, error_type(error))
            raise

    @asynccontextmanager
    async def stream(
        self,
        call: ClientCall,
        transport: Mapping[str, AnyValue],
        describe: Callable[[BaseException], Failure] = failure_of,
    ) -> AsyncIterator[None]:
        """Trace a call that streams an answer; its span has the attributes of its `transport`.

        An HTTP status that is added to `transport` before the span ends is the one that was sent.
        """
        observer = self._begin(call, transport)
        observe_with(observer)
        # gRPC may drop the generator of a client that left without resuming it, but it always calls back.
        call.add_done_callback(once(partial(_call_ended, observer)))
        try:
            yield
        except grpc.aio.AbortError:  # its status was noted where it was aborted
            raise
        except (Unauthenticated, AuthenticationUnavailable) as error:
            observer.ended(describe(error))
            observer.discard()
            raise
        except Exception as error:
            observer.ended(describe(error))
            raise
        except asyncio.CancelledError:
            observer.ended(_cancellation(call))
            raise
        observer.ended(Failure())

    def _begin(self, call: ClientCall, transport: Mapping[str, AnyValue]) -> RequestObserver:
        metadata = text_metadata(call)
        attributes: dict[str, AnyValue] = {
            names.OPERATION: names.TEXT_COMPLETION,
            names.PROVIDER: names.GALLEY,
            names.REQUEST_STREAM: True,
            **transport,
        }
        if metadata.get(names.FORCE_KEY) == names.FORCE_VALUE:
            attributes[names.FORCED] = True
        caller = context_of(metadata)
        parent = trace.get_current_span(caller).get_span_context()
        own = self._scope.request(caller, names.TEXT_COMPLETION, attributes)
        start = self._start(own, parent if parent.is_valid else None, attributes, transport)
        observer = RequestObserver(start)
        observer.begin()
        return observer

    def _start(
        self,
        context: trace.SpanContext,
        parent: trace.SpanContext | None,
        attributes: dict[str, AnyValue],
        transport: Mapping[str, AnyValue],
    ) -> TraceStart:
        start_ns = time.time_ns()
        offset_ns = start_ns - self._clock.now_ns()
        return TraceStart(
            self._scope,
            self._options,
            context,
            parent,
            self._clock,
            offset_ns,
            start_ns,
            attributes,
            transport,
        )


def _call_ended(observer: RequestObserver, call: ClientCall) -> None:
    observer.ended(_cancellation(call))  # counts only if the call has no status yet
    observer.release()


def _cancellation(call: ClientCall) -> Failure:
    remaining_s = call.time_remaining()
    late = remaining_s is not None and remaining_s <= 0
    return Failure(grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED)
