"""A target between a gateway and a real one, which loses states at random."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc


class LossyTarget(rpc.TargetServicer):
    """Forward everything to the target at `target`, but lose the states of a result with chance `loss`."""

    def __init__(self, directory: Path, loss: float) -> None:
        self.address = f"unix:{directory / f'lossy-{loss}'}"
        self.target = ""
        self._loss = loss
        self._chance = random.Random(7)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        server = grpc.aio.server()
        rpc.add_TargetServicer_to_server(self, server)
        server.add_insecure_port(self.address)
        await server.start()
        try:
            yield
        finally:
            await server.stop(None)

    async def Verify(self, request: Any, context: Any) -> pb.VerifyResponse:
        raise NotImplementedError

    async def GetTargetInfo(self, request: pb.GetTargetInfoRequest, context: Any) -> pb.GetTargetInfoResponse:
        async with grpc.aio.insecure_channel(self.target) as channel:
            info: pb.GetTargetInfoResponse = await rpc.TargetStub(channel).GetTargetInfo(request)
            return info

    async def VerifyStream(
        self, request_iterator: AsyncIterator[pb.VerifyStreamRequest], context: Any
    ) -> AsyncIterator[pb.VerifyStreamResponse]:
        async with grpc.aio.insecure_channel(self.target) as channel:
            async for message in rpc.TargetStub(channel).VerifyStream(request_iterator):
                for answer in message.answers:
                    if answer.HasField("result") and self._chance.random() < self._loss:
                        answer.result.ClearField("features")
                yield message
