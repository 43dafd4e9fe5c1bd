"""A gateway, a target and a draft on IPv6: they listen at `::` and register an IPv6 address."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import httpx2

from galley.client.client import AsyncClient
from galley.client.options import Speculation
from galley.common.registry.leases import DRAFT_POOL, TARGET_POOL, ReplicaRegistry
from galley.common.server.healthcheck import problem_of
from galley.common.server.server import Parts, start_server
from galley.common.sockets import host_and_port
from galley.core.names import NGRAM
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from galley.stack.ports import free_ports
from services.draft.__main__ import build as build_draft
from services.draft.settings import DraftSettings
from services.gateway.service import prepare
from services.gateway.settings import GatewaySettings
from services.target.engine.paged.engine import PagedEngine
from services.target.engine.protocol import Limits
from services.target.servicer import TargetService, registered_target
from services.target.settings import TargetSettings
from tests.fakes.redis_servers import Server
from tests.fakes.tiny_model import load_tiny_model
from tests.integration.galley.common.test_listening import needs_ipv6
from tests.integration.services.target.conftest import FLAT, KV_BLOCKS

pytestmark = needs_ipv6

POOL = "ipv6"
PROMPT = [5, 6, 7, 8] * 4


def replica(store: Server) -> dict[str, Any]:
    """Return the settings of a pod whose address is ::1, which it knows without brackets."""
    (port,) = free_ports(1)
    return {
        "host": "::",
        "port": port,
        "advertise": f"::1:{port}",
        "redis_url": store.url,
        "pool": POOL,
        "drain_timeout_s": 1,
    }


async def test_a_completion_over_ipv6(tiny: Path, shared_store: Server) -> None:
    engine = PagedEngine(load_tiny_model(tiny, kv_blocks=KV_BLOCKS), "f00d").serve(FLAT, Limits())
    target = TargetSettings.model_validate(replica(shared_store))
    draft = DraftSettings.model_validate({**replica(shared_store), "tokenizer": str(tiny)})

    async def build_target(server: grpc.aio.Server, parts: Parts) -> Any:
        service = TargetService(engine, parts.telemetry.scope("target"), parts.metrics)
        rpc.add_TargetServicer_to_server(service, server)
        return registered_target(service, target, parts.address)

    gateway = GatewaySettings.model_validate(
        {
            "host": "::",
            "http_port": 0,
            "health_port": 0,
            "redis_url": shared_store.url,
            "pool": POOL,
            "model": str(tiny),
            "model_name": "tiny",
            "drain_timeout_s": 1,
        }
    )
    prepared, parts = prepare(gateway), Parts()
    async with AsyncExitStack() as opened:
        for settings, build in ((target, build_target), (draft, build_draft(draft))):
            opened.push_async_callback((await start_server(settings, build)).stop)
        running = await start_server(gateway, prepared.build, parts, prepared.interceptors)
        opened.push_async_callback(running.stop)
        registry = ReplicaRegistry(shared_store.url, POOL)
        opened.push_async_callback(registry.close)
        assert [lease.address for lease in await registry.read(TARGET_POOL)] == [f"[::1]:{target.port}"]
        assert [lease.address for lease in await registry.read(DRAFT_POOL)] == [f"[::1]:{draft.port}"]

        port = host_and_port(running.address)[1]
        async with AsyncClient(f"[::1]:{port}") as client:
            options: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
            speculation = Speculation(k=4, strategy=NGRAM)
            result = await client.generate(PROMPT, **options, speculation=speculation)
            async with asyncio.timeout(60):  # on a busy machine a draft may be too late for a whole answer
                while not result.speculation.drafted:
                    result = await client.generate(PROMPT, **options, speculation=speculation)
        http = host_and_port(parts.addresses["http"])[1]
        async with httpx2.AsyncClient() as browser:
            body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            answer = (await browser.post(f"http://[::1]:{http}/v1/completions", json=body)).json()
        assert answer["usage"]["completion_tokens"] == len(result.tokens) == 12
        health = host_and_port(running.health_address)[1]
        assert await asyncio.to_thread(problem_of, f"[::1]:{health}") is None
