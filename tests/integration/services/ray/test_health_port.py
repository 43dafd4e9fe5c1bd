"""Replicas of one node that are told the same health port."""

from __future__ import annotations

import asyncio
import warnings

import grpc

from galley.common.server.healthcheck import problem_of
from galley.common.server.server import Parts, RunningServer, Service
from galley.engine.parallel.process_group import Store
from galley.stack.ports import free_ports
from services.target.settings import TargetSettings
from tests.fakes.echo_service import EchoService

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, against pydantic
    from services.target.ray.replica import Leader


class Quick(Leader):
    @property
    def running(self) -> RunningServer:
        assert self._server is not None
        return self._server

    async def _build(self, server: grpc.aio.Server, parts: Parts, store: Store | None) -> Service:
        return EchoService()


async def test_the_second_replica_of_a_node_tells_its_health_at_another_port() -> None:
    settings = TargetSettings(health_port=free_ports(1)[0])
    leaders = [Quick(settings) for _ in range(2)]
    for leader in leaders:
        await leader.serve(None)
    addresses = [leader.running.health_address for leader in leaders]
    assert addresses[0] == f"127.0.0.1:{settings.health_port}"
    assert addresses[1] != addresses[0]
    for address in addresses:
        assert await asyncio.to_thread(problem_of, address) is None
    for leader in leaders:
        await leader.stop()
