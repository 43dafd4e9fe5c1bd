"""The health check that runs as a command, against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from galley.common.server.healthcheck import main, problem_of
from tests.fakes.certificates import Authority, mounted
from tests.fakes.tls_servers import credentials_of

Served = tuple[health.HealthServicer, str]


@contextmanager
def serving(credentials: grpc.ServerCredentials | None = None) -> Iterator[Served]:
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        servicer = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        if credentials is None:
            port = server.add_insecure_port("127.0.0.1:0")
        else:
            port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        yield servicer, f"127.0.0.1:{port}"
        server.stop(None).wait()


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as served:
        yield served


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


def test_unreachable_service_is_named() -> None:
    problem = problem_of("unix:/nonexistent/socket")
    assert problem is not None
    assert problem.startswith("UNAVAILABLE")


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "ADDRESS" in capsys.readouterr().err


def test_health_check_uses_its_certificate_and_authority(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path, "authority")
    files = mounted(tmp_path / "files", authority.ca, authority.issue("galley.test"))
    credentials = credentials_of(files, mutual=True)
    with serving(credentials) as (_, address):
        assert main([address]) == 1
        pair = ["--tls-cert-file", files.cert, "--tls-key-file", files.key]
        assert main([address, "--tls-ca-file", files.ca, *pair]) == 0
        assert main([address, "--tls-ca-file", files.ca, *pair, "--tls-server-name", "galley.test"]) == 0
        assert main([address, "--tls-ca-file", files.ca, *pair, "--tls-server-name", "another"]) == 1
        for name, path in (("CA", files.ca), ("CERT", files.cert), ("KEY", files.key)):
            monkeypatch.setenv(f"GALLEY_TLS_{name}_FILE", path)
        assert main([address]) == 0
    assert main([address, "--tls-ca-file", "/nowhere"]) == 2
    assert "--tls-ca-file: /nowhere: No such file or directory" in capsys.readouterr().err
