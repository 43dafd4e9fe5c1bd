"""The connection to one target or draft address: who serves there, and the stream of requests to it."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from galley.common.tls.channels import generation_of
from galley.core.errors import TokenizerMismatch, Unavailable
from galley.core.session.ports import Replica
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from services.gateway.clock import SECOND
from services.gateway.replicas import messages
from services.gateway.replicas.request_stream import OpenRequest, RequestStream

MEET_TIMEOUT_S = 1.0


class TargetClient:
    """One target address; `info` is its description from the last `meet`."""

    def __init__(
        self, channel: grpc.aio.Channel, address: str, on_met: Callable[[], None] = lambda: None
    ) -> None:
        """`on_met` is called when a request had to meet the target first."""
        self.address = address
        self.info = pb.GetTargetInfoResponse()
        self._stub = rpc.TargetStub(channel)
        self._on_met = on_met
        self._stream: RequestStream[pb.VerifyItem, pb.VerifyAnswer] = RequestStream(
            self._stub.VerifyStream, messages.verify_stream_request, messages.has_more, generation_of(channel)
        )
        self._is_met = False
        self._closes = 0

    @property
    def replica(self) -> Replica | None:
        """Return the process that serves there, None if it is not known."""
        return Replica(self.address, self.info.incarnation) if self._is_met else None

    @property
    def is_outdated(self) -> bool:
        """Return True if it must be met over a new connection, which later requests use."""
        return self._stream.is_outdated

    async def meet(self, timeout_s: float) -> None:
        """Ask the target for its description.

        Raise grpc.aio.AioRpcError if it does not respond in time, TokenizerMismatch or Unavailable if it
        serves another model than before.
        """
        was_outdated = self._stream.is_outdated
        info = await self._stub.GetTargetInfo(pb.GetTargetInfoRequest(), timeout=timeout_s)
        if self.info.tokenizer_hash not in {"", info.tokenizer_hash}:
            raise TokenizerMismatch(info.tokenizer_hash, self.info.tokenizer_hash, "new target")
        if self.info.vocab_size not in {0, info.vocab_size}:
            raise Unavailable(
                f"vocab_size: must be {self.info.vocab_size} as before, got {info.vocab_size} (another model)"
            )
        if was_outdated and self._stream.is_outdated:  # no concurrent call has met it meanwhile
            self._stream.reconnect()
        self.info = info
        self._is_met = True

    async def open(self, item: pb.VerifyItem) -> OpenRequest[pb.VerifyAnswer]:
        """Send a request once it is known who serves.

        Raise what `meet` does, and Unavailable if the client was closed meanwhile.
        """
        if self._stream.is_broken:
            self.lost()  # no request was open to notice
        if not self._is_met or self._stream.is_outdated:
            # However long the request may take: a silent target must not keep it from another one.
            remaining_s = item.slice.remaining_ns / SECOND
            closes = self._closes
            await self.meet(min(remaining_s or MEET_TIMEOUT_S, MEET_TIMEOUT_S))
            if self._closes != closes:  # nobody would end a stream that is opened now
                raise Unavailable(f"the connection to the target at {self.address} was closed")
            self._on_met()
        return self._stream.open(item)

    def lost(self) -> None:
        """Meet again before the next request: another process may serve there."""
        self._is_met = False

    async def close(self) -> None:
        """End the stream, and fail requests that wait for `meet`; later ones may open it again."""
        self._closes += 1
        await self._stream.close()


class DraftClient:
    """One draft address; `info` is its description from the last `meet`."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self.address = address
        self.info = pb.GetDraftInfoResponse()
        self._stub = rpc.DraftStub(channel)
        self.stream: RequestStream[pb.ProposeItem, pb.ProposeAnswer] = RequestStream(
            self._stub.ProposeStream, messages.propose_stream_request, generation=generation_of(channel)
        )
        self._is_met = False

    @property
    def replica(self) -> Replica | None:
        """Return the process that serves there, None if it is not known."""
        is_there = self._is_met and not self.stream.is_broken
        return Replica(self.address, self.info.incarnation) if is_there else None

    @property
    def is_outdated(self) -> bool:
        """Return True if it must be met over a new connection, which later requests use."""
        return self.stream.is_outdated

    async def meet(self, timeout_s: float) -> None:
        """Ask the draft for its description. Raise grpc.aio.AioRpcError if it does not respond in time."""
        was_outdated = self.stream.is_outdated
        self.info = await self._stub.GetDraftInfo(pb.GetDraftInfoRequest(), timeout=timeout_s)
        if self.stream.is_broken or (was_outdated and self.stream.is_outdated):
            self.stream.reconnect()
        self._is_met = True

    def lost(self) -> None:
        """Send no request before the next `meet`: another process may serve there."""
        self._is_met = False

    async def close(self) -> None:
        """End the stream; open requests fail."""
        self.lost()
        await self.stream.close()
