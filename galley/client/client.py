"""The asynchronous Python client.

    async with AsyncClient("10.0.0.1:50051,10.0.0.2:50051") as client:
        result = await client.generate("The capital of France is", max_tokens=16, temperature=0.0)
        print(result.text)

A gateway that dies during an answer is a pause: the stream is resumed at the next gateway, or at the same
address if there is only one (a name or a balancer may lead to another gateway). `Retries` sets for how long.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self, TypeAlias, TypeVar, Unpack

import grpc
import grpc.aio

from galley.client.addresses import parse_addresses
from galley.client.arguments import (
    check_names,
    check_type,
    checked_messages,
    checked_resume_point,
    show_options,
)
from galley.client.audit import AuditCounts, AuditReport, audit_counts, audit_report
from galley.client.credentials import Key, environment_key, key_metadata, tls_to_gateways
from galley.client.errors import GalleyRpcError, rpc_error
from galley.client.options import Conversation, GenerateOptions, Prompt, Retries, Tls
from galley.client.request import generate_request
from galley.client.result import Output, Result
from galley.client.streams import NO_RETRIES, RETRYABLE, AsyncStream, Call, Gateways, Recovery, ResumePoint
from galley.client.structured import parser_of
from galley.common.tls.channels import open_channel
from galley.core.admission.attempts import ATTEMPT_KEY, Attempts
from galley.core.names import FORCE_KEY, FORCE_VALUE
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc

__all__ = ["NO_RETRIES", "AsyncClient", "AsyncStream", "GalleyRpcError"]

Metadata: TypeAlias = tuple[tuple[str, str], ...]
Stub: TypeAlias = "rpc.GenerationAsyncStub"

_KEY_BYTES = 16
# Statuses of a gateway that is down, that stops, or that does not respond.
_LEAVES_GATEWAY = RETRYABLE | {grpc.StatusCode.DEADLINE_EXCEEDED}
_T = TypeVar("_T")


class AsyncClient:
    """A client of one or more gateways over one session store.

    `addresses` are "host:port", comma-separated or a sequence. The first is used until it fails, then the
    next. Without `tls`, "https://" or "grpcs://", calls go in plain text. `api_key` is a key or a token, or a
    callable that returns the current one; None: the one in the file that GALLEY_API_KEY_FILE names, else in
    GALLEY_API_KEY. Calls raise BadKey if it cannot be sent. Streams join the current OpenTelemetry trace of
    the caller; `force_trace` makes the gateways trace every request whatever they sample. `interceptors` are
    added to every channel.

    Connections open with the first call, in the event loop that runs then. Use the client in that loop only,
    and end it by `async with` or `close`.

    >>> async with AsyncClient("127.0.0.1:50051") as client:
    ...     result = await client.generate("Say hello", max_tokens=4)
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        retries: Retries = Retries(),  # noqa: B008  # frozen
        tls: Tls | None = None,
        api_key: Key | None = None,
        force_trace: bool = False,
        interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
    ) -> None:
        """Prepare the client.

        Raises ValueError without an address, TypeError for an argument of another type, BadTlsFile for an
        unusable TLS file.
        """
        check_type("addresses", addresses, str | Sequence, "HOST:PORT, or several")
        check_type("retries", retries, Retries, "Retries(patience_s=…)")
        check_type("tls", tls, Tls | None, "Tls(ca_file=…)")
        check_type("api_key", api_key, str | Callable | None, "text, or a function that returns it")
        try:
            self.addresses, over_tls = parse_addresses(addresses)
        except ValueError as error:
            raise ValueError(f"addresses: {error}") from None
        if tls is None and over_tls:
            tls = Tls()
        self._tls = None if tls is None else tls_to_gateways(tls)
        self._interceptors = interceptors
        self._key = environment_key() if api_key is None else api_key
        self._retries = retries
        self._force_trace = force_trace
        self._channels: list[grpc.aio.Channel] = []
        self._stubs: list[Stub] = []
        self._gateways = Gateways(len(self.addresses))
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections, which ends open streams; further calls raise RuntimeError."""
        self._is_closed = True
        self._stubs = []
        channels, self._channels = self._channels, []
        for channel in channels:
            await channel.close()

    def _stub(self, gateway: int) -> Stub:
        if self._is_closed:
            raise RuntimeError("the client is closed; make another one")
        if not self._stubs:
            self._open()
        if self._loop is not None and self._loop is not _running_loop():
            raise RuntimeError("AsyncClient: must be used in one event loop; make one for each loop")
        return self._stubs[gateway]

    def _open(self) -> None:
        self._loop = _running_loop()
        self._channels = [open_channel(one, self._tls, self._interceptors) for one in self.addresses]
        self._stubs = [rpc.GenerationStub(channel) for channel in self._channels]

    @show_options
    async def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Result:
        """Return the output for `prompt`: text to complete, messages for the chat template, or token ids.

        A gateway that dies meanwhile is a pause. Raises GalleyRpcError; if it has a `session_id`, `resume`
        returns what was generated.

        >>> result = await client.generate("Say hello", max_tokens=4, temperature=0.0)
        >>> result.text, result.tokens, result.usage.output_tokens
        ('Hello, world!\\n', [11, 12, 13, 14], 4)
        """
        async with self._start("generate", prompt, options) as stream:
            return await stream.result()

    @show_options
    async def chat(self, messages: str | Conversation, **options: Unpack[GenerateOptions]) -> Result:
        """Return the model's answer to a conversation; text is one message of the user.

        A message is a `Message`, or a dict with `role` and `content`. `stream` takes a conversation too.

        >>> history = [{"role": "user", "content": "Say hello"}]
        >>> result = await client.chat(history, temperature=0.0)
        >>> history.append(result.message)
        >>> result.message
        Message(role='assistant', content='Hello, world!\\n')
        """
        async with self._start("chat", checked_messages(messages), options) as stream:
            return await stream.result()

    @show_options
    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """Return a stream of the output for `prompt`: text, messages for the chat template, or token ids.

        Each event has one of `started`, `chunk`, `numerics_changed` and `finished`. The text of others than a
        chunk is empty.

        >>> async for event in client.stream("Say hello", max_tokens=4, temperature=0.0):
        ...     print(event.chunk.text, end="")
        Hello, world!
        """
        return self._start("stream", prompt, options)

    def _start(self, method: str, prompt: Prompt, options: GenerateOptions) -> AsyncStream:
        """Request an answer; without an idempotency key it gets one, so that the request can be repeated."""
        check_names(method, options)
        request = generate_request(prompt, options)
        if not request.idempotency_key:
            request.idempotency_key = secrets.token_hex(_KEY_BYTES)
        calls = self._calls(force=options.get("force_trace", False))

        def start(timeout_s: float | None) -> Call:
            return self._call(
                calls, lambda stub, metadata: stub.Generate(request, timeout=timeout_s, metadata=metadata)
            )

        timeout_s = options.get("timeout_s")
        recovery = self._recovery(start, calls, timeout_s)
        output = Output(parse=parser_of(options.get("schema")))
        return AsyncStream(
            start(timeout_s),
            seen=output,
            recovery=recovery,
            max_tokens=options.get("max_tokens"),
            attempts=calls.attempts,
        )

    def resume(
        self,
        session_id: str,
        next_index: int = 0,
        seen_hash: bytes = b"",
        *,
        timeout_s: float | None = None,
        force_trace: bool = False,
    ) -> AsyncStream:
        """Return a stream of a session from output token `next_index` on.

        `seen_hash` checks the tokens before it. `resume_from` of a stream returns these three arguments.

        >>> stream = client.stream("Say hello")
        >>> point = stream.resume_from()
        >>> (await client.resume("session-1", 1).result()).text
        ', world!\\n'
        """
        point = ResumePoint(*checked_resume_point(session_id, next_index, seen_hash))
        return self._resumed(point, None, self._calls(force=force_trace), timeout_s)

    def resume_stream(
        self, stream: AsyncStream, *, timeout_s: float | None = None, force_trace: bool = False
    ) -> AsyncStream:
        """Continue `stream` where it broke; the new stream holds the output of the old one as well."""
        calls = self._calls(stream.attempts, force=force_trace)
        resumed = self._resumed(stream.resume_from(), stream.output, calls, timeout_s)
        resumed.max_tokens = stream.max_tokens
        return resumed

    def _calls(self, attempts: Attempts | None = None, *, force: bool) -> StreamCalls:
        return StreamCalls(attempts or Attempts(), force=force or self._force_trace)

    def _call(self, calls: StreamCalls, make: Callable[[Stub, Metadata], Call]) -> Call:
        stub = self._stub(self._gateways.current)
        return calls.call(lambda metadata: make(stub, (*metadata, *key_metadata(self._key))))

    def _resumed(
        self, point: ResumePoint, seen: Output | None, calls: StreamCalls, timeout_s: float | None
    ) -> AsyncStream:
        call = self._resume(point, calls, timeout_s)
        recovery = self._recovery(None, calls, timeout_s)
        return AsyncStream(call, point, seen, recovery, attempts=calls.attempts)

    def _resume(self, point: ResumePoint, calls: StreamCalls, timeout_s: float | None) -> Call:
        request = pb.ResumeRequest(**point._asdict())
        return self._call(
            calls, lambda stub, metadata: stub.Resume(request, timeout=timeout_s, metadata=metadata)
        )

    def _recovery(
        self, start: Callable[[float | None], Call] | None, calls: StreamCalls, timeout_s: float | None
    ) -> Recovery:
        def resume(point: ResumePoint, timeout_s: float | None) -> Call:
            return self._resume(point, calls, timeout_s)

        return Recovery(self._retries, start, resume, self._gateways, timeout_s)

    async def abort(self, session_id: str, *, timeout_s: float | None = None) -> None:
        """End a session for good.

        >>> await client.abort("session-1")
        """
        request = pb.AbortRequest(session_id=session_id)
        await self._first_response(
            lambda stub, left_s, key: stub.Abort(request, timeout=left_s, metadata=key), timeout_s
        )

    async def audit(self, session_id: str, *, timeout_s: float | None = None) -> AuditReport:
        """Have a target compute the answer of a finished session again, and compare it with the token log.

        >>> (await client.audit("session-1")).verdict
        <Verdict.SAME: 'same'>
        """
        request = pb.AuditRequest(session_id=session_id)
        response = await self._first_response(
            lambda stub, left_s, key: stub.Audit(request, timeout=left_s, metadata=key), timeout_s
        )
        return audit_report(session_id, response)

    async def audit_counts(self, *, timeout_s: float | None = None) -> AuditCounts:
        """Return the totals of all audits of the deployment.

        >>> (await client.audit_counts()).differing
        0
        """
        request = pb.GetAuditCountsRequest()
        response = await self._first_response(
            lambda stub, left_s, key: stub.GetAuditCounts(request, timeout=left_s, metadata=key), timeout_s
        )
        return audit_counts(response)

    async def model_info(self, model: str = "", *, timeout_s: float | None = None) -> pb.GetModelInfoResponse:
        """Return the served model, its strategies and its limits; `model`, if given, must be its name.

        >>> (await client.model_info()).model
        'tiny'
        """
        request = pb.GetModelInfoRequest(model=model)
        return await self._first_response(
            lambda stub, left_s, key: stub.GetModelInfo(request, timeout=left_s, metadata=key), timeout_s
        )

    async def _first_response(
        self, make: Callable[[Stub, float | None, Metadata], Awaitable[_T]], timeout_s: float | None
    ) -> _T:
        """Return the response of the first gateway that is available. Raises GalleyRpcError."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        left, used = len(self.addresses), self._gateways.current
        while True:
            left -= 1
            try:
                left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
                return await make(self._stub(used), left_s, key_metadata(self._key))
            except grpc.RpcError as error:
                if error.code() in _LEAVES_GATEWAY:
                    self._gateways.leave(used)
                if not left or error.code() not in RETRYABLE:
                    raise rpc_error(error) from error
                used = self._gateways.after(used)


def _running_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        problem = "AsyncClient: must be called by a coroutine; galley.Client does the same without asyncio"
        raise RuntimeError(problem) from None


class StreamCalls:
    """The calls of one stream, in order: all in the trace context in which the stream was requested."""

    def __init__(self, attempts: Attempts, *, force: bool) -> None:
        """Take the current context. `force` makes the gateways trace the request whatever they sample."""
        self.attempts = attempts
        # A caller that has never imported OpenTelemetry has no span, and need not wait for the import.
        self._context = _otel_context().get_current() if "opentelemetry.context" in sys.modules else None
        self._forced = ((FORCE_KEY, FORCE_VALUE),) if force else ()

    def call(self, make: Callable[[Metadata], _T]) -> _T:
        """Return `make(metadata)`, called in that context."""
        own = ((ATTEMPT_KEY, str(self.attempts.next())), *self._forced)
        if self._context is None:
            return make(own)
        token = _otel_context().attach(self._context)
        try:
            return make((*w3c_metadata(), *own))
        finally:
            _otel_context().detach(token)


def w3c_metadata() -> Metadata:
    """Return the metadata that carries the current trace; empty outside of a trace."""
    from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415  # may not be installed
        TraceContextTextMapPropagator,
    )

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())


def _otel_context() -> Any:
    from opentelemetry import context  # noqa: PLC0415  # may not be installed

    return context
