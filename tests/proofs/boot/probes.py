"""Probes and hooks, run as the kubelet does: from the node, at the pod's address."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.deploy.render import Manifest
from tests.proofs.boot.network import at

# Runs a command in the container within seconds: exit status and output.
Execute = Callable[[Sequence[str], float], Awaitable[tuple[int, str]]]
_SERVING = health_pb2.HealthCheckResponse.SERVING
# 200 to 399 are success, as the kubelet has it.
_HTTP_SUCCESS = range(200, 400)


@dataclass(frozen=True, slots=True)
class Probe:
    """A rendered probe with Kubernetes' defaults; `grace_s` replaces the pod's own, if set."""

    spec: Manifest
    delay_s: float
    period_s: float
    timeout_s: float
    failures: int
    successes: int
    grace_s: float | None

    @staticmethod
    def of(spec: Manifest) -> Probe:
        return Probe(
            spec,
            spec.get("initialDelaySeconds", 0),
            spec.get("periodSeconds", 10),
            spec.get("timeoutSeconds", 1),
            spec.get("failureThreshold", 3),
            spec.get("successThreshold", 1),
            spec.get("terminationGracePeriodSeconds"),
        )


async def problem_of(probe: Probe, ip: str, ports: Mapping[str, int], execute: Execute) -> str | None:
    """Return why a probe fails; None if it passes."""
    try:
        async with asyncio.timeout(probe.timeout_s):
            return await act(probe.spec, ip, ports, execute, probe.timeout_s)
    except TimeoutError:
        return f"no response within {probe.timeout_s:g} s"


async def act(
    spec: Manifest, ip: str, ports: Mapping[str, int], execute: Execute, timeout_s: float
) -> str | None:
    """Run a probe or hook; return its problem or None. Raises ValueError for an unknown kind."""
    if "grpc" in spec:
        return await _grpc(at(ip, spec["grpc"]["port"]), spec["grpc"].get("service") or "", timeout_s)
    if "httpGet" in spec:
        return await asyncio.to_thread(_http, spec["httpGet"], ip, ports, timeout_s)
    if "tcpSocket" in spec:
        return await _tcp(ip, _number(spec["tcpSocket"]["port"], ports))
    if "exec" in spec:
        status, output = await execute(spec["exec"]["command"], timeout_s)
        return None if status == 0 else f"exit {status}: {output.strip()[-300:]}"
    if "sleep" in spec:
        await asyncio.sleep(float(spec["sleep"]["seconds"]))
        return None
    raise ValueError(f"a probe or hook of {sorted(spec)}")


def _number(port: int | str, ports: Mapping[str, int]) -> int:
    return ports[port] if isinstance(port, str) else port


async def _grpc(address: str, service: str, timeout_s: float) -> str | None:
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout_s
            )
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return None if answer.status == _SERVING else f"status {answer.status}"


async def _tcp(ip: str, port: int) -> str | None:
    try:
        _, writer = await asyncio.open_connection(ip, port)
    except OSError as error:
        return str(error)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return None


def _http(spec: Manifest, ip: str, ports: Mapping[str, int], timeout_s: float) -> str | None:
    port = _number(spec["port"], ports)
    connection = http.client.HTTPConnection(ip, port, timeout=timeout_s)
    if spec.get("scheme") == "HTTPS":
        # The kubelet looks at no certificate either.
        context = ssl._create_unverified_context()
        connection = http.client.HTTPSConnection(ip, port, timeout=timeout_s, context=context)
    headers = {header["name"]: header["value"] for header in spec.get("httpHeaders") or ()}
    try:
        connection.request("GET", spec.get("path") or "/", headers=headers)
        status = connection.getresponse().status
    except OSError as error:
        return str(error)
    finally:
        connection.close()
    return None if status in _HTTP_SUCCESS else f"HTTP {status}"
