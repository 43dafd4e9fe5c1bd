"""A service process whose service leaves COUNT tasks behind."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable

import grpc

from galley.common.config.settings import ServiceSettings
from galley.common.server.server import Parts, Prepared, run_main
from tests.fakes.echo_service import EchoService, building


class Leaking(EchoService):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.forgotten = [asyncio.ensure_future(asyncio.Event().wait()) for _ in range(count)]


def build(_: ServiceSettings) -> Callable[[grpc.aio.Server, Parts], Awaitable[EchoService]]:
    async def built(server: grpc.aio.Server, parts: Parts) -> EchoService:
        service: EchoService = await building(Leaking(int(sys.argv[1])))(server, parts)
        return service

    return built


if __name__ == "__main__":
    run_main(ServiceSettings, "leaking", "for tests", lambda settings: Prepared(build(settings)), argv=())
