"""The network of one node: a namespace for each pod, routed through the node's packet filter.

The ruleset for `nft -f` is rebuilt whenever a pod starts, ends or changes its readiness, and replaced in
one transaction; recorded connections stay. Everything lies in the namespaces of the node's
process and ends with it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path
from typing import Any

from tests.proofs.boot.policies import EGRESS, INGRESS, Endpoint, Opening, Policies
from tests.proofs.boot.sandbox import run

POD_INTERFACES = "pod*"
_CHAINS = ("services", "passing", "local", "judge", "leaving", "coming", "refuse")
# Only new connections are judged; late packets of a forgotten connection are not.
_ONLY_FIRST = (
    "ct state established,related accept",
    "tcp flags & (fin | syn | rst | ack) != syn drop",
)
# IPv6 finds neighbours by ICMP, which no policy speaks of.
_NEIGHBOURS = {4: (), 6: ("meta l4proto ipv6-icmp accept",)}
_ADDRESS = {EGRESS: ("saddr", "daddr"), INGRESS: ("daddr", "saddr")}


@dataclass(frozen=True, slots=True)
class Family:
    """The addresses of a cluster of one family, and what nft, ip and the kernel call it."""

    version: int
    word: str
    length: int
    node_ip: str
    dns_ip: str
    forwarding: str
    pods: str
    services: str

    @property
    def table(self) -> str:
        return f"{self.word} galley"

    @property
    def key(self) -> str:
        return f"{self.word} saddr . {self.word} daddr . meta l4proto . th dport"

    @property
    def set_type(self) -> str:
        address = f"ipv{self.version}_addr"
        return f"type {address} . {address} . inet_proto . inet_service; size 65535; flags dynamic;"

    def pod_ips(self) -> Iterator[str]:
        return (self.pods.format(n // 250 + 1, n % 250 + 2) for n in itertools.count())

    def service_ips(self) -> Iterator[str]:
        return (self.services.format(n) for n in range(1, 255))


IPV4 = Family(
    *(4, "ip", 32, "10.244.0.1", "10.96.0.10", "/proc/sys/net/ipv4/ip_forward"),
    *("10.244.{}.{}", "10.96.1.{}"),
)
IPV6 = Family(
    *(6, "ip6", 128, "fd00:10:244::1", "fd00:10:96::a", "/proc/sys/net/ipv6/conf/all/forwarding"),
    *("fd00:10:244:{}::{}", "fd00:10:96:1::{}"),
)


def at(ip: str, port: int) -> str:
    """Return an address and a port as one text."""
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


@dataclass(frozen=True, slots=True)
class VirtualAddress:
    """A port of a Service with an address of its own, and its current backends."""

    ip: str
    port: int
    backends: tuple[tuple[str, int], ...]
    protocol: str = "TCP"


@dataclass(frozen=True, slots=True, order=True)
class Connection:
    """A connection, or an attempt: source, and destination behind the Service."""

    source: str
    destination: str
    protocol: str
    port: int


@dataclass(frozen=True, slots=True)
class Traffic:
    made: frozenset[Connection]
    refused: frozenset[Connection]


def ruleset(
    known: Sequence[Endpoint],
    policies: Policies,
    addresses: Sequence[VirtualAddress],
    family: Family = IPV4,
) -> str:
    table = family.table
    pods = [end for end in known if end.is_pod]
    chains = {
        "services": [
            "type nat hook prerouting priority dstnat; policy accept;",
            *(line for address in addresses for line in _balance(address, family)),
        ],
        "passing": [
            "type filter hook forward priority filter; policy drop;",
            *_ONLY_FIRST,
            "jump judge",
        ],
        "local": [
            "type filter hook input priority filter; policy accept;",
            *_NEIGHBOURS[family.version],
            *_ONLY_FIRST,
            f'iifname "{POD_INTERFACES}" jump judge',
        ],
        "judge": [
            "jump leaving",
            "jump coming",
            f"meta l4proto {{ tcp, udp }} update @made {{ {family.key} }}",
            "accept",
        ],
        "leaving": list(_guard(pods, known, policies, EGRESS, family)),
        "coming": list(_guard(pods, known, policies, INGRESS, family)),
        "refuse": [f"meta l4proto {{ tcp, udp }} update @refused {{ {family.key} }}", "drop"],
    }
    declared = [f"set {name} {{ {family.set_type} }}" for name in ("made", "refused")]
    bodies = [f"chain {name} {{\n    " + "\n    ".join(chains[name]) + "\n  }" for name in _CHAINS]
    return "\n".join(
        [
            _table(table, [*declared, *(f"chain {name} {{ }}" for name in reversed(_CHAINS[3:]))]),
            *(f"add chain {table} {name}" for name in _CHAINS[3:]),
            *(f"add chain {table} {name} {{ {chains[name][0]} }}" for name in _CHAINS[:3]),
            *(f"flush chain {table} {name}" for name in _CHAINS),
            _table(table, reversed(bodies)),
        ]
    )


def read_traffic(listed: Mapping[str, Any]) -> Traffic:
    sets: dict[str, frozenset[Connection]] = {"made": frozenset(), "refused": frozenset()}
    for entry in listed["nftables"]:
        if "set" in entry and entry["set"]["name"] in sets:
            sets[entry["set"]["name"]] = frozenset(map(_connection, entry["set"].get("elem", ())))
    return Traffic(sets["made"], sets["refused"])


def _connection(element: Any) -> Connection:
    value = element["elem"]["val"] if "elem" in element else element
    source, destination, protocol, port = value["concat"]
    return Connection(source, destination, str(protocol).upper(), int(port))


def _table(table: str, lines: Iterator[str] | Sequence[str]) -> str:
    return f"table {table} {{\n  " + "\n  ".join(lines) + "\n}"


def _balance(address: VirtualAddress, family: Family) -> Iterator[str]:
    """Draw a ready backend for each connection at random, as kube-proxy does."""
    protocol = address.protocol.lower()
    meant = f"{family.word} daddr {address.ip} {protocol} dport {address.port}"
    for left, (ip, port) in zip(range(len(address.backends), 0, -1), address.backends, strict=True):
        drawn = "" if left == 1 else f" numgen random mod {left} == 0"
        yield f"{meant}{drawn} dnat to {at(ip, port)}"


def _guard(
    pods: Sequence[Endpoint], known: Sequence[Endpoint], policies: Policies, direction: str, family: Family
) -> Iterator[str]:
    own, _ = _ADDRESS[direction]
    for pod in pods:
        if not policies.is_guarded(pod, direction):
            continue
        for opening in policies.of(pod, direction):
            for match in _matches(opening, pod, known, policies, family):
                yield f"{family.word} {own} {pod.ip} {match} return"
        yield f"{family.word} {own} {pod.ip} jump refuse"


def _matches(
    opening: Opening, pod: Endpoint, known: Sequence[Endpoint], policies: Policies, family: Family
) -> Iterator[str]:
    for peer, match in _peers(opening, known, policies, family):
        destination = pod if opening.direction == INGRESS else peer
        for ports in _ports(opening, destination):
            yield f"{match} {ports}".strip()


def _peers(
    opening: Opening, known: Sequence[Endpoint], policies: Policies, family: Family
) -> Iterator[tuple[Endpoint, str]]:
    _, other = _ADDRESS[opening.direction]
    anyone, word = Endpoint("anyone", "0.0.0.0"), family.word
    if not opening.peers:
        yield anyone, ""
    for end in known:
        if opening.peers and end.is_pod and opening.admits(end, policies.namespaces):
            yield end, f"{word} {other} {end.ip}"
    for block in (peer["ipBlock"] for peer in opening.peers if "ipBlock" in peer):
        if ip_network(block["cidr"]).version != family.version:
            continue
        without = block.get("except") or []
        unless = f" {word} {other} != {{ {', '.join(without)} }}" if without else ""
        yield anyone, f"{word} {other} {block['cidr']}{unless}"


def _ports(opening: Opening, destination: Endpoint) -> Iterator[str]:
    if not opening.ports:
        yield ""
    for port in opening.ports:
        numbers = port.numbers(destination)
        if numbers is None:
            continue
        first, last = numbers
        protocol = port.protocol.lower()
        if (first, last) == (0, 65535):
            yield f"meta l4proto {protocol}"
        else:
            yield f"{protocol} dport {first}" if first == last else f"{protocol} dport {first}-{last}"


_NAMESPACES = Path("/run/netns")


class Wires:
    def __init__(self, family: Family) -> None:
        self._family = family
        self._ip = ("ip", f"-{family.version}")
        self._numbers = itertools.count(1)
        self.spaces: dict[str, Path] = {}

    async def open(self) -> None:
        # `ip netns add` creates this folder, but the mount comes before the first namespace.
        await run("mkdir", "-p", str(_NAMESPACES))
        await run("mount", "-t", "tmpfs", "tmpfs", str(_NAMESPACES))
        await run("ip", "link", "set", "lo", "up")
        family = self._family
        await run(*self._ip, "address", "add", f"{family.dns_ip}/{family.length}", "dev", "lo")
        await run("tee", family.forwarding, stdin="1")

    async def attach(self, ip: str) -> Path:
        number = next(self._numbers)
        name, link = f"p{number}", f"pod{number}"
        node, length = self._family.node_ip, self._family.length
        # An address that is first looked for on the link could not be bound for a second.
        sure = "nodad" if self._family.version == 6 else ""
        await run("ip", "netns", "add", name)
        await run(
            *(*self._ip, "-batch", "-"),
            stdin=f"""link add {link} type veth peer name eth0 netns {name}
address add {node}/{length} dev {link} {sure}
link set {link} up
route add {ip}/{length} dev {link}
""",
        )
        await run(
            *(*self._ip, "-n", name, "-batch", "-"),
            stdin=f"""link set lo up
address add {ip}/{length} dev eth0 {sure}
link set eth0 up
route add {node} dev eth0
route add default via {node}
""",
        )
        self.spaces[ip] = _NAMESPACES / name
        return self.spaces[ip]

    async def detach(self, ip: str) -> None:
        await run("ip", "netns", "delete", self.spaces.pop(ip).name)

    async def filter(self, rules: str) -> None:
        await run("nft", "-f", "-", stdin=rules)

    async def traffic(self) -> Traffic:
        return read_traffic(json.loads(await run("nft", "-j", "list", "table", *self._family.table.split())))
