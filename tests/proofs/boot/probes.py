"""Probes and hooks, asked as the kubelet asks them: from the node, at the pod's address."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import ssl
from collections.abc import Mapping
from dataclasses import dataclass

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.deploy.render import Manifest
from tests.proofs.boot.launch import Container

_SERVING = health_pb2.HealthCheckResponse.SERVING
# 200 to 399 are success, as the kubelet has it.
_HTTP_SUCCESS = range(200, 400)


@dataclass(frozen=True, slots=True)
class Probe:
    """A rendered probe, with Kubernetes' own defaults."""

    spec: Manifest

    @property
    def delay_s(self) -> float:
        """Before it is asked first."""
        return float(self.spec.get("initialDelaySeconds", 0))

    @property
    def period_s(self) -> float:
        """From one time to the next."""
        return float(self.spec.get("periodSeconds", 10))

    @property
    def timeout_s(self) -> float:
        """Of one answer."""
        return float(self.spec.get("timeoutSeconds", 1))

    @property
    def failures(self) -> int:
        """In a row until it counts as failed."""
        return int(self.spec.get("failureThreshold", 3))

    @property
    def successes(self) -> int:
        """In a row until it counts as passed again."""
        return int(self.spec.get("successThreshold", 1))

    @property
    def grace_s(self) -> float | None:
        """Of a liveness or startup probe: its own grace for the end of what failed it."""
        told = self.spec.get("terminationGracePeriodSeconds")
        return None if told is None else float(told)


async def problem_of(probe: Probe, ip: str, ports: Mapping[str, int], container: Container) -> str | None:
    """Why it fails at present; None if it passes."""
    try:
        async with asyncio.timeout(probe.timeout_s):
            return await act(probe.spec, ip, ports, container, probe.timeout_s)
    except TimeoutError:
        return f"no answer within {probe.timeout_s:g} s"


async def act(
    spec: Manifest, ip: str, ports: Mapping[str, int], container: Container, timeout_s: float
) -> str | None:
    """Do what a probe or a hook says; why it failed, or None. Raises ValueError for what nobody knows."""
    if "grpc" in spec:
        return await _grpc(f"{ip}:{spec['grpc']['port']}", spec["grpc"].get("service") or "", timeout_s)
    if "httpGet" in spec:
        return await asyncio.to_thread(_http, spec["httpGet"], ip, ports, timeout_s)
    if "tcpSocket" in spec:
        return await _tcp(ip, _number(spec["tcpSocket"]["port"], ports))
    if "exec" in spec:
        status, said = await container.execute(spec["exec"]["command"], timeout_s)
        return None if status == 0 else f"exit {status}: {said.strip()[-300:]}"
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
