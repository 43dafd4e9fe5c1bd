"""A Python client of the gateways: streams of confirmed tokens that go on by themselves.

    async with AsyncClient("10.0.0.1:50051,10.0.0.2:50051") as client:
        async for event in client.generate("The capital of France is", max_tokens=16, temperature=0.0):
            print(event.chunk.text, end="")

A gateway that dies under a stream is a pause: the stream is resumed at the next one, or at the same address
if there is one only (behind a name or a balancer it may well be another gateway). See `Retries`.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc
import grpc.aio

from galley.client.credentials import Key, key_interceptors
from galley.client.errors import BadKey, GalleyRpcError, rpc_error
from galley.client.options import GenerateOptions, Message, Prompt, Retries, Speculation, Tls
from galley.client.request import generate_request
from galley.client.streams import NO_RETRIES, Call, Comeback, ResumePoint, TokenStream
from galley.client.tracing import CallerTrace
from galley.common.tls.channels import ChannelTls, open_channel
from galley.common.tls.credentials import TlsFiles
from galley.common.tls.files import NamedFile
from galley.common.tracing.telemetry import Telemetry
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc

__all__ = [
    "NO_RETRIES",
    "AsyncClient",
    "BadKey",
    "GalleyRpcError",
    "Message",
    "ResumePoint",
    "Retries",
    "Speculation",
    "Tls",
    "TokenStream",
]

_KEY_BYTES = 16
_T = TypeVar("_T")


class AsyncClient:
    """One or more gateways over one session store, by address; open it with `async with`.

    `addresses` are "host:port", several with commas or as a sequence. The first is asked until it fails,
    then the next. `tls` encrypts, and says which gateways to trust; without it calls go in plain text.
    `api_key` says who calls, where the gateways ask for it: a key or a token, or what is called for one at
    each call; None is that of GALLEY_API_KEY, or in the file GALLEY_API_KEY_FILE, if one is set. Calls raise
    BadKey where it cannot be shown.
    Streams belong to the trace that they are asked for in, as OpenTelemetry's current span tells it;
    `telemetry` (galley.common.tracing.telemetry.start_telemetry) makes calls spans of their own besides.
    `force_trace` has the gateways trace every request, whatever they sample.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        telemetry: Telemetry | None = None,
        retries: Retries = Retries(),  # noqa: B008  # frozen
        *,
        tls: Tls | None = None,
        api_key: Key | None = None,
        force_trace: bool = False,
    ) -> None:
        """Raises ValueError if there is no address, or a file of `tls` is of no use (BadFile)."""
        told = addresses.split(",") if isinstance(addresses, str) else addresses
        self.addresses = tuple(dict.fromkeys(address.strip() for address in told if address.strip()))
        if not self.addresses:
            raise ValueError("a client needs the address of a gateway")
        self._tls = None if tls is None else channel_tls(tls)
        self._key_interceptors = key_interceptors(api_key)
        self._telemetry = telemetry or Telemetry()
        self._retries = retries
        self._force_trace = force_trace
        self._channels: list[grpc.aio.Channel] = []
        self._at = 0

    async def __aenter__(self) -> Self:
        self._channels = [
            open_channel(
                address, self._tls, [*self._telemetry.client_interceptors(), *self._key_interceptors]
            )
            for address in self.addresses
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        channels, self._channels = self._channels, []
        for channel in channels:
            await channel.close()

    @property
    def _stub(self) -> rpc.GenerationAsyncStub:
        """Of the gateway that is asked at present."""
        if not self._channels:
            raise RuntimeError("open the client with `async with AsyncClient(address) as client`")
        return rpc.GenerationStub(self._channels[self._at])

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> TokenStream:
        """Stream the answer to `prompt`: text as it stands, messages for the chat template, or token ids.

        The request gets an idempotency key if it has none, so that it can be repeated.
        """
        request = generate_request(prompt, options)
        if not request.idempotency_key:
            request.idempotency_key = secrets.token_hex(_KEY_BYTES)

        trace = self._trace(force=options.get("force_trace", False))

        def ask(timeout_s: float | None) -> Call:
            return trace.call(lambda told: self._stub.Generate(request, timeout=timeout_s, metadata=told))

        timeout_s = options.get("timeout_s")
        return TokenStream(ask(timeout_s), comeback=self._comeback(ask, trace, timeout_s))

    def resume(
        self,
        session_id: str,
        next_index: int,
        seen_hash: bytes = b"",
        *,
        timeout_s: float | None = None,
        force_trace: bool = False,
    ) -> TokenStream:
        """Go on with a session at output token `next_index`."""
        point = ResumePoint(session_id, next_index, seen_hash)
        return self._resumed(point, (), self._trace(force=force_trace), timeout_s)

    def resume_stream(
        self, stream: TokenStream, *, timeout_s: float | None = None, force_trace: bool = False
    ) -> TokenStream:
        """Go on with `stream` where it was cut off; the new stream knows the tokens of the old one."""
        trace = self._trace(force=force_trace)
        return self._resumed(stream.resume_from(), stream.token_ids, trace, timeout_s)

    def _trace(self, *, force: bool) -> CallerTrace:
        return CallerTrace(force=force or self._force_trace)

    def _resumed(
        self, point: ResumePoint, seen: Sequence[int], trace: CallerTrace, timeout_s: float | None
    ) -> TokenStream:
        def again(timeout_s: float | None) -> Call:
            return self._resume(point, trace, timeout_s)

        comeback = self._comeback(again, trace, timeout_s)
        return TokenStream(again(timeout_s), point.session_id, point.next_index, seen, comeback)

    def _resume(self, point: ResumePoint, trace: CallerTrace, timeout_s: float | None) -> Call:
        request = pb.ResumeRequest(**point._asdict())
        return trace.call(lambda told: self._stub.Resume(request, timeout=timeout_s, metadata=told))

    def _comeback(
        self, ask_again: Callable[[float | None], Call], trace: CallerTrace, timeout_s: float | None
    ) -> Comeback:
        at = self._at

        def resume(point: ResumePoint, timeout_s: float | None) -> Call:
            return self._resume(point, trace, timeout_s)

        def leave() -> None:
            nonlocal at
            if self._at == at:  # else another stream has left it already
                self._at = (at + 1) % len(self.addresses)
            at = self._at

        return Comeback(self._retries, ask_again, resume, leave, timeout_s)

    async def abort(self, session_id: str, *, timeout_s: float | None = None) -> None:
        """End a session for good."""
        request = pb.AbortRequest(session_id=session_id)
        await self._ask(lambda stub: stub.Abort(request, timeout=timeout_s))

    async def model_info(self, model: str = "", *, timeout_s: float | None = None) -> pb.GetModelInfoResponse:
        """What the gateways serve, and their limits."""
        request = pb.GetModelInfoRequest(model=model)
        return await self._ask(lambda stub: stub.GetModelInfo(request, timeout=timeout_s))

    async def _ask(self, call: Callable[[rpc.GenerationAsyncStub], Awaitable[_T]]) -> _T:
        """One answer from the first gateway that is there."""
        left = len(self.addresses)
        while True:
            left -= 1
            try:
                return await call(self._stub)
            except grpc.RpcError as error:
                if not left or error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise rpc_error(error) from error
                self._at = (self._at + 1) % len(self.addresses)


def channel_tls(tls: Tls) -> ChannelTls:
    """For `open_channel`. Raises BadFile."""
    files = TlsFiles(
        NamedFile("ca_file", tls.ca_file),
        NamedFile("cert_file", tls.cert_file),
        NamedFile("key_file", tls.key_file),
    )
    return ChannelTls(files, tls.server_name)
