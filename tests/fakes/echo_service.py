"""A small service for the tests of galley.common: it speaks galley.v1.Draft."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from galley.common.config.settings import ServiceSettings
from galley.common.server.server import Parts
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from tests.fakes.certificates import caller_of

SERVICE = "galley.v1.Draft"


class EchoService(rpc.DraftServicer):
    grpc_services = (SERVICE,)

    def __init__(self, failure: BaseException | None = None) -> None:
        self.failure = failure
        self.entered = asyncio.Event()
        self.release = asyncio.Event()
        self.release.set()
        self.cancelled = asyncio.Event()
        self.closed = False
        # The name in the certificate of each caller; empty if it presented none.
        self.callers: list[str] = []

    async def Propose(self, request: pb.ProposeRequest, context: Any) -> pb.ProposeResponse:
        self.callers.append(caller_of(context))
        self.entered.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if self.failure is not None:
            raise self.failure
        return pb.ProposeResponse(answers=_answers(request))

    async def ProposeStream(
        self, request_iterator: AsyncIterator[pb.ProposeStreamRequest], context: Any
    ) -> AsyncIterator[pb.ProposeStreamResponse]:
        async for request in request_iterator:
            if self.failure is not None:
                raise self.failure
            yield pb.ProposeStreamResponse(answers=_answers(request))

    async def GetDraftInfo(self, request: object, context: Any) -> pb.GetDraftInfoResponse:
        return pb.GetDraftInfoResponse()

    async def LoadDraft(self, request_iterator: object, context: Any) -> pb.LoadDraftResponse:
        raise NotImplementedError

    async def drain(self) -> None:
        await self.release.wait()

    async def close(self) -> None:
        self.closed = True


def _answers(request: pb.ProposeRequest | pb.ProposeStreamRequest) -> list[pb.ProposeAnswer]:
    return [pb.ProposeAnswer(session_id=item.slice.session_id) for item in request.items]


def settings(**given: object) -> ServiceSettings:
    return ServiceSettings.model_validate({"max_message_bytes": 1024, "drain_timeout_s": 5} | given)


def building(service: EchoService) -> Any:
    async def build(server: grpc.aio.Server, parts: Parts) -> EchoService:
        rpc.add_DraftServicer_to_server(service, server)
        return service

    return build
