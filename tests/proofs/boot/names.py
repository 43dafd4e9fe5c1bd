"""Services and what stands behind them: endpoints, virtual addresses, and the cluster's DNS.

What changes reaches readers after `LAG_S`, as in a cluster, where controllers tell one another: a pod that
ends is still sent new connections for a moment.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from dnslib import QTYPE, RCODE, RR, A, DNSRecord

from tests.deploy.render import Manifest
from tests.proofs.boot.policies import Endpoint, selects
from tests.proofs.boot.ruleset import VirtualAddress

DOMAIN = "cluster.local"
LAG_S = 0.5
_TTL_S = 5
_DNS_PORT = 53
_HEADLESS = "None"


@dataclass(frozen=True, slots=True)
class Served:
    """A pod as Services see it."""

    end: Endpoint
    ready: bool
    # Of a pod of a StatefulSet: the Service that names it.
    hostname: str = ""
    subdomain: str = ""


@dataclass(frozen=True, slots=True)
class Service:
    """A rendered Service; `ip` is empty for one that is headless."""

    name: str
    namespace: str
    spec: Manifest
    ip: str

    @staticmethod
    def of(manifest: Manifest, namespace: str, ip: str) -> Service:
        """With the address `ip`, unless it wants none."""
        headless = manifest["spec"].get("clusterIP") == _HEADLESS
        return Service(manifest["metadata"]["name"], namespace, manifest["spec"], "" if headless else ip)

    @property
    def host(self) -> str:
        """Its full name."""
        return f"{self.name}.{self.namespace}.svc.{DOMAIN}"

    def behind(self, pods: Sequence[Served]) -> list[Served]:
        """The pods that it sends connections to."""
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
        """Its ports with who serves them; none where it is headless."""
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
    """Whether the pod has a port of the name: one without is none of its endpoints."""
    target = port.get("targetPort", port["port"])
    return not isinstance(target, str) or target in (pod.ports or {})


def target_port(port: Manifest, pod: Endpoint) -> int:
    """The number at the pod; raises KeyError if it has no port of that name."""
    target: Any = port.get("targetPort", port["port"])
    return (pod.ports or {})[target] if isinstance(target, str) else int(target)


class Answers:
    """What each name stands for at present. Names outside the cluster do not exist."""

    def __init__(self, services: Sequence[Service], pods: Sequence[Served]) -> None:
        self._addresses: dict[str, list[str]] = {}
        for service in services:
            behind = service.behind(pods)
            self._addresses[service.host] = [service.ip] if service.ip else [pod.end.ip for pod in behind]
            for pod in behind:
                if pod.hostname and pod.subdomain == service.name:
                    self._addresses[f"{pod.hostname}.{service.host}"] = [pod.end.ip]

    def of(self, name: str) -> list[str]:
        """Addresses, possibly none."""
        return self._addresses.get(name.rstrip(".").lower(), [])


class NameServer:
    """Answers A queries by UDP and TCP; `asked` holds every name that somebody wanted and there was not."""

    def __init__(self, answers: Callable[[], Answers]) -> None:
        self._answers = answers
        self._transport: asyncio.DatagramTransport | None = None
        self._server: asyncio.Server | None = None
        self.unknown: set[str] = set()
        self.queries = 0

    async def start(self, ip: str) -> None:
        """Listen at an address of this machine."""
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(
            lambda: _Datagrams(self.reply), (ip, _DNS_PORT)
        )
        self._server = await asyncio.start_server(self._serve, ip, _DNS_PORT)

    def close(self) -> None:
        """Stop listening."""
        if self._transport is not None:
            self._transport.close()
        if self._server is not None:
            self._server.close()

    def reply(self, query: bytes) -> bytes:
        """The answer to one message."""
        request = DNSRecord.parse(query)
        name = str(request.q.qname)
        addresses = self._answers().of(name)
        reply = request.reply()
        self.queries += 1
        if not addresses:
            self.unknown.add(name.rstrip("."))
            reply.header.rcode = RCODE.NXDOMAIN
        elif request.q.qtype == QTYPE.A:
            for address in addresses:
                reply.add_answer(RR(request.q.qname, QTYPE.A, rdata=A(address), ttl=_TTL_S))
        packed: bytes = reply.pack()
        return packed

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                size = int.from_bytes(await reader.readexactly(2), "big")
                answer = self.reply(await reader.readexactly(size))
                writer.write(len(answer).to_bytes(2, "big") + answer)
                await writer.drain()
        writer.close()


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, reply: Callable[[bytes], bytes]) -> None:
        self._reply = reply
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The selector loop's own is none by its class.
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if self._transport is not None:
            self._transport.sendto(self._reply(data), addr)


def resolv_conf(server: str, namespace: str, config: Manifest | None = None) -> str:
    """What the kubelet writes for a pod that takes its names from the cluster (dnsPolicy ClusterFirst)."""
    options = {"ndots": "5"}
    options |= {option["name"]: str(option["value"]) for option in (config or {}).get("options") or ()}
    search = f"{namespace}.svc.{DOMAIN} svc.{DOMAIN} {DOMAIN}"
    told = " ".join(f"{name}:{value}" for name, value in options.items())
    return f"nameserver {server}\nsearch {search}\noptions {told}\n"
