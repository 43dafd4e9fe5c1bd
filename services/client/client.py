"""A Python client of the gateway: streams of confirmed tokens that know where to go on.

    async with GalleyClient("127.0.0.1:50051") as client:
        stream = client.generate("The capital of France is", max_tokens=16, temperature=0.0)
        async for event in stream:
            print(event.chunk.text, end="")

A stream remembers the tokens that it gave out. If it breaks, `client.resume_stream(stream)` goes on after
the last of them, at this or (with another client) any other gateway.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, NamedTuple, Self, Unpack

import grpc
import grpc.aio

from services.client.credentials import key_interceptors
from services.client.errors import GalleyRpcError, rpc_error
from services.client.options import GenerateOptions, Message, Prompt, Speculation
from services.client.request import generate_request
from services.common.pb.galley.v1 import galley_pb2 as pb
from services.common.pb.galley.v1 import galley_pb2_grpc as rpc
from services.common.telemetry import Telemetry
from services.core.content import prefix_hash

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

__all__ = ["GalleyClient", "GalleyRpcError", "Message", "ResumePoint", "Speculation", "TokenStream"]


class ResumePoint(NamedTuple):
    """The arguments of `GalleyClient.resume`: where a stream goes on."""

    session_id: str
    next_index: int
    seen_hash: bytes


class TokenStream(AsyncIterator[pb.StreamEvent]):
    """The events of one stream, in order; raises GalleyRpcError where the RPC does."""

    def __init__(
        self,
        # Of Generate or Resume: their responses both hold an `event`.
        call: grpc.aio.UnaryStreamCall[Any, Any],
        session_id: str = "",
        next_index: int = 0,
        seen: Sequence[int] = (),
    ) -> None:
        self._call = call
        self._responses = call.__aiter__()
        self._next_index = next_index
        self.session_id = session_id
        # All output tokens from index 0 on, or from `next_index` on where the ones before are unknown.
        self.token_ids: list[int] = list(seen)
        self.finished: pb.Finished | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> pb.StreamEvent:
        try:
            event: pb.StreamEvent = (await anext(self._responses)).event
        except grpc.RpcError as error:
            raise rpc_error(error) from error
        self._note(event)
        return event

    def _note(self, event: pb.StreamEvent) -> None:
        match event.WhichOneof("event"):
            case "started":
                self.session_id = event.started.session_id
            case "chunk":
                self.token_ids += event.chunk.token_ids
                self._next_index = event.chunk.index + len(event.chunk.token_ids)
            case "finished":
                self.finished = event.finished
            case _:
                pass

    def resume_from(self) -> ResumePoint:
        """Where to go on; `seen_hash` is empty (not checked) if the stream itself began later than at 0."""
        whole = len(self.token_ids) == self._next_index
        seen_hash = prefix_hash(self.token_ids) if whole and self.token_ids else b""
        return ResumePoint(self.session_id, self._next_index, seen_hash)

    def cancel(self) -> None:
        """Stop the stream; the session stays resumable."""
        self._call.cancel()


class GalleyClient:
    """One gateway, by address ("host:port"); open it with `async with`.

    `api_key` says who calls, where the gateway asks for it; None is that of GALLEY_API_KEY, if it is set.
    `telemetry` (services.common.telemetry.start_telemetry) makes its calls spans; without it there are none.
    """

    def __init__(
        self, address: str, telemetry: Telemetry | None = None, *, api_key: str | None = None
    ) -> None:
        self.address = address
        self._key_interceptors = key_interceptors(api_key)
        self._telemetry = telemetry or Telemetry()
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        self._channel = grpc.aio.insecure_channel(
            self.address,
            interceptors=[*self._telemetry.client_interceptors(), *self._key_interceptors],
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    @property
    def _stub(self) -> rpc.GenerationAsyncStub:
        if self._channel is None:
            raise RuntimeError("open the client with `async with GalleyClient(address) as client`")
        return rpc.GenerationStub(self._channel)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> TokenStream:
        """Stream the answer to `prompt`: text as it stands, messages for the chat template, or token ids."""
        request = generate_request(prompt, options)
        return TokenStream(self._stub.Generate(request, timeout=options.get("timeout_s")))

    def resume(
        self, session_id: str, next_index: int, seen_hash: bytes = b"", *, timeout_s: float | None = None
    ) -> TokenStream:
        """Go on with a session at output token `next_index`."""
        request = pb.ResumeRequest(session_id=session_id, next_index=next_index, seen_hash=seen_hash)
        return TokenStream(self._stub.Resume(request, timeout=timeout_s), session_id, next_index)

    def resume_stream(self, stream: TokenStream, *, timeout_s: float | None = None) -> TokenStream:
        """Go on with `stream` where it broke off; the new stream knows the tokens of the old one."""
        point = stream.resume_from()
        request = pb.ResumeRequest(**point._asdict())
        call = self._stub.Resume(request, timeout=timeout_s)
        return TokenStream(call, point.session_id, point.next_index, stream.token_ids)

    async def abort(self, session_id: str, *, timeout_s: float | None = None) -> None:
        """End a session for good."""
        try:
            await self._stub.Abort(pb.AbortRequest(session_id=session_id), timeout=timeout_s)
        except grpc.RpcError as error:
            raise rpc_error(error) from error

    async def model_info(self, model: str = "", *, timeout_s: float | None = None) -> pb.GetModelInfoResponse:
        """What the gateway serves, and its limits."""
        try:
            return await self._stub.GetModelInfo(pb.GetModelInfoRequest(model=model), timeout=timeout_s)
        except grpc.RpcError as error:
            raise rpc_error(error) from error
