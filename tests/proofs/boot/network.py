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
from pathlib import Path
from typing import Any

from tests.proofs.boot.policies import EGRESS, INGRESS, Endpoint, Opening, Policies
from tests.proofs.boot.sandbox import run

TABLE = "ip galley"
POD_INTERFACES = "pod*"
_CHAINS = ("services", "passing", "local", "judge", "leaving", "coming", "refuse")
_KEY = "ip saddr . ip daddr . meta l4proto . th dport"
_SET = "type ipv4_addr . ipv4_addr . inet_proto . inet_service; size 65535; flags dynamic;"
# Only new connections are judged; late packets of a forgotten connection are not.
_ONLY_FIRST = (
    "ct state established,related accept",
    "tcp flags & (fin | syn | rst | ack) != syn drop",
)
_ADDRESS = {EGRESS: ("saddr", "daddr"), INGRESS: ("daddr", "saddr")}


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


def ruleset(known: Sequence[Endpoint], policies: Policies, addresses: Sequence[VirtualAddress]) -> str:
    pods = [end for end in known if end.is_pod]
    chains = {
        "services": [
            "type nat hook prerouting priority dstnat; policy accept;",
            *(line for address in addresses for line in _balance(address)),
        ],
        "passing": [
            "type filter hook forward priority filter; policy drop;",
            *_ONLY_FIRST,
            "jump judge",
        ],
        "local": [
            "type filter hook input priority filter; policy accept;",
            *_ONLY_FIRST,
            f'iifname "{POD_INTERFACES}" jump judge',
        ],
        "judge": [
            "jump leaving",
            "jump coming",
            f"meta l4proto {{ tcp, udp }} update @made {{ {_KEY} }}",
            "accept",
        ],
        "leaving": list(_guard(pods, known, policies, EGRESS)),
        "coming": list(_guard(pods, known, policies, INGRESS)),
        "refuse": [f"meta l4proto {{ tcp, udp }} update @refused {{ {_KEY} }}", "drop"],
    }
    declared = [f"set made {{ {_SET} }}", f"set refused {{ {_SET} }}"]
    bodies = [f"chain {name} {{\n    " + "\n    ".join(chains[name]) + "\n  }" for name in _CHAINS]
    return "\n".join(
        [
            _table([*declared, *(f"chain {name} {{ }}" for name in reversed(_CHAINS[3:]))]),
            *(f"add chain {TABLE} {name}" for name in _CHAINS[3:]),
            *(f"add chain {TABLE} {name} {{ {chains[name][0]} }}" for name in _CHAINS[:3]),
            *(f"flush chain {TABLE} {name}" for name in _CHAINS),
            _table(reversed(bodies)),
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


def _table(lines: Iterator[str] | Sequence[str]) -> str:
    return f"table {TABLE} {{\n  " + "\n  ".join(lines) + "\n}"


def _balance(address: VirtualAddress) -> Iterator[str]:
    """Draw a ready backend for each connection at random, as kube-proxy does."""
    protocol = address.protocol.lower()
    meant = f"ip daddr {address.ip} {protocol} dport {address.port}"
    for left, (ip, port) in zip(range(len(address.backends), 0, -1), address.backends, strict=True):
        drawn = "" if left == 1 else f" numgen random mod {left} == 0"
        yield f"{meant}{drawn} dnat to {ip}:{port}"


def _guard(
    pods: Sequence[Endpoint], known: Sequence[Endpoint], policies: Policies, direction: str
) -> Iterator[str]:
    own, _ = _ADDRESS[direction]
    for pod in pods:
        if not policies.is_guarded(pod, direction):
            continue
        for opening in policies.of(pod, direction):
            for match in _matches(opening, pod, known, policies):
                yield f"ip {own} {pod.ip} {match} return"
        yield f"ip {own} {pod.ip} jump refuse"


def _matches(opening: Opening, pod: Endpoint, known: Sequence[Endpoint], policies: Policies) -> Iterator[str]:
    for peer, match in _peers(opening, known, policies):
        destination = pod if opening.direction == INGRESS else peer
        for ports in _ports(opening, destination):
            yield f"{match} {ports}".strip()


def _peers(opening: Opening, known: Sequence[Endpoint], policies: Policies) -> Iterator[tuple[Endpoint, str]]:
    _, other = _ADDRESS[opening.direction]
    anyone = Endpoint("anyone", "0.0.0.0")
    if not opening.peers:
        yield anyone, ""
    for end in known:
        if opening.peers and end.is_pod and opening.admits(end, policies.namespaces):
            yield end, f"ip {other} {end.ip}"
    for block in (peer["ipBlock"] for peer in opening.peers if "ipBlock" in peer):
        without = block.get("except") or []
        unless = f" ip {other} != {{ {', '.join(without)} }}" if without else ""
        yield anyone, f"ip {other} {block['cidr']}{unless}"


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


NODE_IP = "10.244.0.1"
DNS_IP = "10.96.0.10"
_NAMESPACES = Path("/run/netns")


def pod_ips() -> Iterator[str]:
    return (f"10.244.{n // 250 + 1}.{n % 250 + 2}" for n in itertools.count())


def service_ips() -> Iterator[str]:
    return (f"10.96.1.{n}" for n in range(1, 255))


class Wires:
    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self.spaces: dict[str, Path] = {}

    async def open(self) -> None:
        # `ip netns add` creates this folder, but the mount comes before the first namespace.
        await run("mkdir", "-p", str(_NAMESPACES))
        await run("mount", "-t", "tmpfs", "tmpfs", str(_NAMESPACES))
        await run("ip", "link", "set", "lo", "up")
        await run("ip", "address", "add", f"{DNS_IP}/32", "dev", "lo")
        await run("tee", "/proc/sys/net/ipv4/ip_forward", stdin="1")

    async def attach(self, ip: str) -> Path:
        number = next(self._numbers)
        name, link = f"p{number}", f"pod{number}"
        await run("ip", "netns", "add", name)
        await run(
            *("ip", "-batch", "-"),
            stdin=f"""link add {link} type veth peer name eth0 netns {name}
address add {NODE_IP}/32 dev {link}
link set {link} up
route add {ip}/32 dev {link}
""",
        )
        await run(
            *("ip", "-n", name, "-batch", "-"),
            stdin=f"""link set lo up
address add {ip}/32 dev eth0
link set eth0 up
route add {NODE_IP} dev eth0
route add default via {NODE_IP}
""",
        )
        self.spaces[ip] = _NAMESPACES / name
        return self.spaces[ip]

    async def detach(self, ip: str) -> None:
        await run("ip", "netns", "delete", self.spaces.pop(ip).name)

    async def filter(self, rules: str) -> None:
        await run("nft", "-f", "-", stdin=rules)

    async def traffic(self) -> Traffic:
        return read_traffic(json.loads(await run("nft", "-j", "list", "table", *TABLE.split())))
