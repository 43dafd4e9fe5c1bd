"""Redis, Valkey and a Redis Cluster, empty for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.redis_clusters import KINDS, Cluster, backend
from tests.fakes.redis_servers import Server


@pytest.fixture(scope="module", params=KINDS)
def shared_server(request: pytest.FixtureRequest) -> Iterator[Server | Cluster]:
    with backend(request.param) as server:
        yield server


@pytest.fixture
async def server(shared_server: Server | Cluster) -> Server | Cluster:
    await shared_server.command("FLUSHALL")
    return shared_server
