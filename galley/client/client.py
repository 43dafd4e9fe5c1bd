"""The asynchronous Python client.

    async with AsyncClient("10.0.0.1:50051,10.0.0.2:50051") as client:
        async for event in client.stream("The capital of France is", max_tokens=16, temperature=0.0):
            print(event.chunk.text, end="")

A gateway that dies during a stream is a pause: the stream is resumed at the next gateway, or at the same
address if there is only one (a name or a balancer may lead to another gateway). `Retries` sets for how long.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self, TypeAlias, TypeVar, Unpack

import grpc
import grpc.aio

from galley.client.addresses import parse_addresses
from galley.client.credentials import Key, environment_key, key_metadata, tls_to_gateways
from galley.client.errors import GalleyRpcError, rpc_error
from galley.client.options import GenerateOptions, Message, Prompt, Retries, Speculation, Tls
from galley.client.streams import NO_RETRIES, AsyncStream, Call, Recovery, ResumePoint
from galley.common.tls.channels import open_channel
from galley.core.names import FORCE_KEY, FORCE_VALUE
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc

__all__ = ["NO_RETRIES", "AsyncClient", "AsyncStream", "GalleyRpcError"]

Metadata: TypeAlias = tuple[tuple[str, str], ...]
Stub: TypeAlias = "rpc.GenerationAsyncStub"

_KEY_BYTES = 16
# Most options have the name of their field.
_SAMPLING = pb.SamplingParams.DESCRIPTOR.fields_by_name.keys() & GenerateOptions.__annotations__.keys()
_REQUEST = pb.GenerateRequest.DESCRIPTOR.fields_by_name.keys() & GenerateOptions.__annotations__.keys()
_T = TypeVar("_T")


class AsyncClient:
    """A client of one or more gateways over one session store; open it with `async with`.

    `addresses` are "host:port", comma-separated or a sequence. The first is used until it fails, then the
    next. Without `tls`, "https://" or "grpcs://", calls go in plain text. `api_key` is a key or a token, or a
    callable that returns the current one; None: the one in the file that GALLEY_API_KEY_FILE names, else in
    GALLEY_API_KEY. Calls raise BadKey if it cannot be sent. Streams join the current OpenTelemetry trace of
    the caller; `force_trace` makes the gateways trace every request whatever they sample. `interceptors` are
    added to every channel.
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
        """Prepare the client. Raises ValueError without an address, BadTlsFile for an unusable TLS file."""
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
        self._current = 0

    async def __aenter__(self) -> Self:
        self._channels = [open_channel(one, self._tls, self._interceptors) for one in self.addresses]
        self._stubs = [rpc.GenerationStub(channel) for channel in self._channels]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stubs = []
        for channel in self._channels:
            await channel.close()

    @property
    def _stub(self) -> Stub:
        if not self._stubs:
            raise RuntimeError("open the client with `async with AsyncClient(address) as client`")
        return self._stubs[self._current]

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """Stream the output for `prompt`: text to complete, messages for the chat template, or token ids.

        The request gets an idempotency key if it has none, so that it can be repeated.
        """
        request = generate_request(prompt, options)
        if not request.idempotency_key:
            request.idempotency_key = secrets.token_hex(_KEY_BYTES)

        trace = self._trace(force=options.get("force_trace", False))

        def start(timeout_s: float | None) -> Call:
            return self._call(
                trace, lambda stub, metadata: stub.Generate(request, timeout=timeout_s, metadata=metadata)
            )

        timeout_s = options.get("timeout_s")
        recovery = self._recovery(start, trace, timeout_s)
        return AsyncStream(start(timeout_s), recovery=recovery, max_tokens=options.get("max_tokens"))

    def resume(
        self,
        session_id: str,
        next_index: int = 0,
        seen_hash: bytes = b"",
        *,
        timeout_s: float | None = None,
        force_trace: bool = False,
    ) -> AsyncStream:
        """Stream a session from output token `next_index` on; `seen_hash` checks the tokens before it."""
        point = ResumePoint(session_id, next_index, seen_hash)
        return self._resumed(point, (), self._trace(force=force_trace), timeout_s)

    def resume_stream(
        self, stream: AsyncStream, *, timeout_s: float | None = None, force_trace: bool = False
    ) -> AsyncStream:
        """Continue `stream` where it broke; the new stream holds the tokens of the old one as well."""
        trace = self._trace(force=force_trace)
        resumed = self._resumed(stream.resume_from(), stream.tokens, trace, timeout_s)
        resumed.max_tokens = stream.max_tokens
        return resumed

    def _trace(self, *, force: bool) -> CallerTrace:
        return CallerTrace(force=force or self._force_trace)

    def _call(self, trace: CallerTrace, make: Callable[[Stub, Metadata], Call]) -> Call:
        return trace.call(lambda metadata: make(self._stub, (*metadata, *key_metadata(self._key))))

    def _resumed(
        self, point: ResumePoint, seen: Sequence[int], trace: CallerTrace, timeout_s: float | None
    ) -> AsyncStream:
        call = self._resume(point, trace, timeout_s)
        recovery = self._recovery(None, trace, timeout_s)
        return AsyncStream(call, point, seen, recovery)

    def _resume(self, point: ResumePoint, trace: CallerTrace, timeout_s: float | None) -> Call:
        request = pb.ResumeRequest(**point._asdict())
        return self._call(
            trace, lambda stub, metadata: stub.Resume(request, timeout=timeout_s, metadata=metadata)
        )

    def _recovery(
        self, start: Callable[[float | None], Call] | None, trace: CallerTrace, timeout_s: float | None
    ) -> Recovery:
        used = self._current

        def resume(point: ResumePoint, timeout_s: float | None) -> Call:
            return self._resume(point, trace, timeout_s)

        def switch_gateway() -> None:
            nonlocal used
            if self._current == used:  # else another stream has switched already
                self._current = (used + 1) % len(self.addresses)
            used = self._current

        return Recovery(self._retries, start, resume, switch_gateway, timeout_s)

    async def abort(self, session_id: str, *, timeout_s: float | None = None) -> None:
        """End a session for good."""
        request = pb.AbortRequest(session_id=session_id)
        await self._first_response(lambda stub, key: stub.Abort(request, timeout=timeout_s, metadata=key))

    async def model_info(self, model: str = "", *, timeout_s: float | None = None) -> pb.GetModelInfoResponse:
        """Return the served model, its strategies and its limits; `model`, if given, must be its name."""
        request = pb.GetModelInfoRequest(model=model)
        return await self._first_response(
            lambda stub, key: stub.GetModelInfo(request, timeout=timeout_s, metadata=key)
        )

    async def _first_response(self, make: Callable[[Stub, Metadata], Awaitable[_T]]) -> _T:
        """Return the response of the first gateway that is available. Raises GalleyRpcError."""
        left = len(self.addresses)
        while True:
            left -= 1
            try:
                return await make(self._stub, key_metadata(self._key))
            except grpc.RpcError as error:
                if not left or error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise rpc_error(error) from error
                self._current = (self._current + 1) % len(self.addresses)


def generate_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """Return the request; the gateway checks its bounds. Raises TypeError if messages and ids are mixed."""
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    speculation = _speculation(given.pop("speculation", Speculation()))
    request = pb.GenerateRequest(
        sampling=pb.SamplingParams(**{name: given[name] for name in _SAMPLING & given.keys()}),
        speculation=speculation,
        **{name: given[name] for name in _REQUEST & given.keys()},
    )
    _set_prompt(request, prompt)
    return request


def _speculation(options: Speculation) -> pb.Speculation:
    if options.off:
        return pb.Speculation(mode=pb.Speculation.MODE_OFF)
    if options.k is None and not options.strategy:
        return pb.Speculation(mode=pb.Speculation.MODE_AUTO)
    return pb.Speculation(mode=pb.Speculation.MODE_FIXED, k=options.k, strategy=options.strategy)


def _set_prompt(request: pb.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
        return
    messages = [part for part in prompt if isinstance(part, Message)]
    ids = [part for part in prompt if isinstance(part, int)]
    if messages and ids:
        raise TypeError("prompt: must be text, messages or token ids, got messages and token ids")
    if messages:
        turns = [pb.ChatMessage(role=turn.role, content=turn.content) for turn in messages]
        request.messages.CopyFrom(pb.ChatMessages(messages=turns))
    else:
        request.token_ids.CopyFrom(pb.TokenIds(ids=ids))


class CallerTrace:
    """The trace context in which a stream was requested; its retries are made in the same context."""

    def __init__(self, *, force: bool) -> None:
        """Take the current context. `force` makes the gateways trace the request whatever they sample."""
        # A caller that has never imported OpenTelemetry has no span, and need not wait for the import.
        self._context = _otel_context().get_current() if "opentelemetry.context" in sys.modules else None
        self._forced = ((FORCE_KEY, FORCE_VALUE),) if force else ()

    def call(self, make: Callable[[Metadata], _T]) -> _T:
        """Return `make(metadata)`, called in that context."""
        if self._context is None:
            return make(self._forced)
        token = _otel_context().attach(self._context)
        try:
            return make((*w3c_metadata(), *self._forced))
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
