"""The node's packet filter as text for `nft -f`: policies that really hold, Services that really balance.

Made anew as a whole whenever a pod comes, goes or changes its readiness, and taken over in one transaction;
counters and the sets of connections seen live on. What is open stays open, as in a cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.proofs.boot.policies import EGRESS, INGRESS, Endpoint, Opening, Policies

TABLE = "ip galley"
POD_INTERFACES = "pod*"
_CHAINS = ("services", "passing", "local", "judge", "leaving", "coming", "refuse")
_KEY = "ip saddr . ip daddr . meta l4proto . th dport"
_SET = "type ipv4_addr . ipv4_addr . inet_proto . inet_service; size 65535; flags dynamic;"
# Judged are attempts to connect; what comes late of a connection that is forgotten already is none.
_ONLY_FIRST = (
    "ct state established,related accept",
    "tcp flags & (fin | syn | rst | ack) != syn drop",
)
_ADDRESS = {EGRESS: ("saddr", "daddr"), INGRESS: ("daddr", "saddr")}


@dataclass(frozen=True, slots=True)
class VirtualAddress:
    """A port of a Service that has an address of its own, and who serves it at present."""

    ip: str
    port: int
    backends: tuple[tuple[str, int], ...]
    protocol: str = "TCP"


@dataclass(frozen=True, slots=True, order=True)
class Connection:
    """One that was made, or tried: from whom, to what was behind the Service."""

    source: str
    destination: str
    protocol: str
    port: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the filter has seen; `packets` are the first of connections that each opening let through."""

    made: frozenset[Connection]
    refused: frozenset[Connection]
    packets: Mapping[str, int]


def ruleset(known: Sequence[Endpoint], policies: Policies, addresses: Sequence[VirtualAddress]) -> str:
    """The text for the pods and other ends that are known at present."""
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
    counters = [f"counter {opening.name} {{ }}" for opening in policies.openings]
    declared = [f"set made {{ {_SET} }}", f"set refused {{ {_SET} }}", *counters]
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
    """What `nft -j list table` says."""
    sets: dict[str, frozenset[Connection]] = {"made": frozenset(), "refused": frozenset()}
    packets: dict[str, int] = {}
    for entry in listed["nftables"]:
        if "set" in entry and entry["set"]["name"] in sets:
            sets[entry["set"]["name"]] = frozenset(map(_connection, entry["set"].get("elem", ())))
        elif "counter" in entry:
            packets[entry["counter"]["name"]] = entry["counter"]["packets"]
    return Traffic(sets["made"], sets["refused"], packets)


def _connection(element: Any) -> Connection:
    value = element["elem"]["val"] if "elem" in element else element
    source, destination, protocol, port = value["concat"]
    return Connection(source, destination, str(protocol).upper(), int(port))


def _table(lines: Iterator[str] | Sequence[str]) -> str:
    return f"table {TABLE} {{\n  " + "\n  ".join(lines) + "\n}"


def _balance(address: VirtualAddress) -> Iterator[str]:
    """As kube-proxy does: each connection to one of those that are ready, drawn evenly."""
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
                yield f"ip {own} {pod.ip} {match} counter name {opening.name} return"
        yield f"ip {own} {pod.ip} jump refuse"


def _matches(opening: Opening, pod: Endpoint, known: Sequence[Endpoint], policies: Policies) -> Iterator[str]:
    for peer, match in _peers(opening, known, policies):
        destination = pod if opening.direction == INGRESS else peer
        for ports in _ports(opening, destination):
            yield f"{match} {ports}".strip()


def _peers(opening: Opening, known: Sequence[Endpoint], policies: Policies) -> Iterator[tuple[Endpoint, str]]:
    _, other = _ADDRESS[opening.direction]
    anyone = Endpoint("anyone", "0.0.0.0")  # no address to listen on
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
