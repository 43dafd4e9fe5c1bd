"""Servers and stores for the gateway's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from redis import asyncio as redis_asyncio

from services.gateway.store.redis import RedisStore
from tests.fakes.redis_clusters import KINDS, Cluster, backend
from tests.fakes.redis_servers import BINARIES, Server, running


@pytest.fixture(scope="session", params=KINDS)
def shared_server(request: pytest.FixtureRequest) -> Iterator[Server | Cluster]:
    with backend(request.param) as server:
        yield server


@pytest.fixture
async def store(shared_server: Server | Cluster) -> AsyncIterator[RedisStore]:
    store = RedisStore(shared_server.url)
    yield store
    await store.close()


@pytest.fixture
async def raw(shared_server: Server | Cluster) -> AsyncIterator[redis_asyncio.Redis]:
    client = shared_server.raw()
    yield client
    await client.aclose()


@pytest.fixture(params=BINARIES)
def own_store(request: pytest.FixtureRequest) -> Iterator[Server]:
    with running(request.param) as server:
        yield server
