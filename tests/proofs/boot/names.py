"""Services and what stands behind them: endpoints, virtual addresses, and the cluster's DNS.

What changes reaches readers after `LAG_S`, as in a cluster, where controllers tell one another: a pod that
ends is still sent new connections for a moment.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dnslib import AAAA, QTYPE, RCODE, RR, A, DNSRecord
from dnslib.server import BaseResolver, DNSLogger, DNSServer, TCPServer, UDPServer

from tests.deploy.render import Manifest
from tests.proofs.boot.network import VirtualAddress
from tests.proofs.boot.policies import Endpoint, selects

DOMAIN = "cluster.local"
LAG_S = 0.5
_TTL_S = 5
_HEADLESS = "None"


@dataclass(frozen=True, slots=True)
class Served:
    end: Endpoint
    ready: bool
    # Of a pod of a StatefulSet: the Service that names it.
    hostname: str = ""
    subdomain: str = ""


@dataclass(frozen=True, slots=True)
class Service:
    name: str
    namespace: str
    spec: Manifest
    ip: str

    @staticmethod
    def of(manifest: Manifest, namespace: str, ip: str) -> Service:
        headless = manifest["spec"].get("clusterIP") == _HEADLESS
        return Service(manifest["metadata"]["name"], namespace, manifest["spec"], "" if headless else ip)

    @property
    def host(self) -> str:
        return f"{self.name}.{self.namespace}.svc.{DOMAIN}"

    def behind(self, pods: Sequence[Served]) -> list[Served]:
        selector = {"matchLabels": self.spec.get("selector") or {}}
        unready = bool(self.spec.get("publishNotReadyAddresses"))
        return [
            pod
            for pod in pods
            if pod.end.namespace == self.namespace
            and selects(selector, pod.end.labels or {})
            and (pod.ready or unready)
        ]

    def addresses(self, pods: Sequence[Served]) -> list[VirtualAddress]:
        if not self.ip:
            return []
        ends = [pod.end for pod in self.behind(pods)]
        return [
            VirtualAddress(
                self.ip,
                int(port["port"]),
                tuple((end.ip, target_port(port, end)) for end in ends if has_target(port, end)),
                port.get("protocol", "TCP"),
            )
            for port in self.spec.get("ports") or []
        ]


def has_target(port: Manifest, pod: Endpoint) -> bool:
    """Return True if the pod has a port of the name; otherwise it is no endpoint."""
    target = port.get("targetPort", port["port"])
    return not isinstance(target, str) or target in (pod.ports or {})


def target_port(port: Manifest, pod: Endpoint) -> int:
    """Return the pod's port number. Raises KeyError if it has no port of that name."""
    target: Any = port.get("targetPort", port["port"])
    return (pod.ports or {})[target] if isinstance(target, str) else int(target)


def addresses_of(services: Sequence[Service], pods: Sequence[Served]) -> dict[str, list[str]]:
    result: dict[str, list[str]] = {}
    for service in services:
        behind = service.behind(pods)
        result[service.host] = [service.ip] if service.ip else [pod.end.ip for pod in behind]
        for pod in behind:
            if pod.hostname and pod.subdomain == service.name:
                result[f"{pod.hostname}.{service.host}"] = [pod.end.ip]
    return result


class _UdpOverIpv6(UDPServer):  # type: ignore[misc]  # is untyped
    address_family = socket.AF_INET6


class _TcpOverIpv6(TCPServer):  # type: ignore[misc]  # is untyped
    address_family = socket.AF_INET6


class NameServer(BaseResolver):  # type: ignore[misc]  # is untyped
    """Answer A and AAAA queries by UDP and TCP; `unknown` holds the names that do not exist."""

    def __init__(self, addresses: Callable[[], Mapping[str, list[str]]]) -> None:
        self._addresses = addresses
        self._servers: list[DNSServer] = []
        self.unknown: set[str] = set()

    def start(self, ip: str) -> None:
        quiet = DNSLogger(logf=lambda _: None)
        servers = (_UdpOverIpv6, _TcpOverIpv6) if ":" in ip else (UDPServer, TCPServer)
        self._servers = [DNSServer(self, ip, logger=quiet, server=server) for server in servers]
        for server in self._servers:
            server.start_thread()

    def close(self) -> None:
        for server in self._servers:
            server.stop()

    def resolve(self, request: DNSRecord, handler: object) -> DNSRecord:
        name = str(request.q.qname).rstrip(".").lower()
        addresses = self._addresses().get(name, [])
        reply = request.reply()
        if not addresses:
            self.unknown.add(name)
            reply.header.rcode = RCODE.NXDOMAIN
        for address in addresses:
            kind, data = (QTYPE.AAAA, AAAA) if ":" in address else (QTYPE.A, A)
            if request.q.qtype == kind:
                reply.add_answer(RR(request.q.qname, kind, rdata=data(address), ttl=_TTL_S))
        return reply


def resolv_conf(server: str, namespace: str, config: Manifest | None = None) -> str:
    """Return the file that the kubelet writes for dnsPolicy ClusterFirst."""
    options = {"ndots": "5"}
    options |= {option["name"]: str(option["value"]) for option in (config or {}).get("options") or ()}
    search = f"{namespace}.svc.{DOMAIN} svc.{DOMAIN} {DOMAIN}"
    written = " ".join(f"{name}:{value}" for name, value in options.items())
    return f"nameserver {server}\nsearch {search}\noptions {written}\n"
