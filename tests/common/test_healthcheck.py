"""The health check that runs as a command, against a real server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.common.healthcheck import main, problem_of

if TYPE_CHECKING:
    from collections.abc import Iterator

Served = tuple[health.HealthServicer, str]


@pytest.fixture
def served() -> Iterator[Served]:
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        servicer = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield servicer, f"127.0.0.1:{port}"
        server.stop(None).wait()


def test_serving_is_healthy(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    servicer, address = served
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    assert main([address]) == 0
    assert capsys.readouterr().err == ""


def test_not_serving_is_not(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    servicer, address = served
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert main([address]) == 1
    assert "NOT_SERVING" in capsys.readouterr().err


def test_nobody_there_is_said() -> None:
    problem = problem_of("unix:/nonexistent/socket")
    assert problem is not None
    assert problem.startswith("UNAVAILABLE")


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "ADDRESS" in capsys.readouterr().err
