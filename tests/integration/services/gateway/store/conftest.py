"""Servers and stores for the gateway's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.redis_clusters import KINDS, Cluster, backend
from tests.fakes.redis_servers import BINARIES, Server, running


@pytest.fixture(scope="session", params=KINDS)
def shared_server(request: pytest.FixtureRequest) -> Iterator[Server | Cluster]:
    with backend(request.param) as server:
        yield server


@pytest.fixture(params=BINARIES)
def own_store(request: pytest.FixtureRequest) -> Iterator[Server]:
    with running(request.param) as server:
        yield server
