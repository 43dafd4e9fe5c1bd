"""Servers and stores for the gateway's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.redis_clusters import KINDS, Cluster, backend
from tests.fakes.redis_servers import Server


@pytest.fixture(scope="session", params=KINDS)
def shared_server(request: pytest.FixtureRequest) -> Iterator[Server | Cluster]:
    """One server of each kind, and a cluster of three, for all tests that do not hurt it."""
    with backend(request.param) as server:
        yield server
