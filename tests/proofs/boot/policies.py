"""What NetworkPolicies allow: a pure reading of them, one `Opening` a rule.

Once any policy selects a pod for a direction, only what an opening of that direction lets through may pass;
a connection needs leave at both of its ends. Addresses are those behind a Service: that is what the network
plugins of clusters look at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network

from tests.deploy.render import Manifest

INGRESS, EGRESS = "ingress", "egress"
_PEERS = {INGRESS: "from", EGRESS: "to"}


@dataclass(frozen=True, slots=True)
class Endpoint:
    name: str
    ip: str
    namespace: str = ""
    labels: Mapping[str, str] | None = None
    ports: Mapping[str, int] | None = None

    @property
    def is_pod(self) -> bool:
        return self.labels is not None


@dataclass(frozen=True, slots=True)
class Port:
    """A port of a rule: None stands for all ports, `end` is the last of a range."""

    protocol: str = "TCP"
    number: int | str | None = None
    end: int | None = None

    def __str__(self) -> str:
        until = f"-{self.end}" if self.end else ""
        return f"{self.protocol}/{'*' if self.number is None else self.number}{until}"

    def numbers(self, destination: Endpoint) -> tuple[int, int] | None:
        """Return the first and last number at a destination; None if it has no port of that name."""
        if self.number is None:
            return 0, 65535
        first = (destination.ports or {}).get(self.number) if isinstance(self.number, str) else self.number
        if first is None:
            return None
        return first, self.end or first


@dataclass(frozen=True, slots=True)
class Opening:
    """One rule of one policy: allowed sources (`ingress`) or destinations (`egress`)."""

    policy: str
    namespace: str
    direction: str
    index: int
    selector: Manifest
    peers: tuple[Manifest, ...]
    ports: tuple[Port, ...]

    @property
    def name(self) -> str:
        """Return a name that is unique among all openings."""
        return f"{self.policy}.{self.direction}.{self.index}"

    def guards(self, pod: Endpoint) -> bool:
        return pod.is_pod and pod.namespace == self.namespace and selects(self.selector, pod.labels or {})

    def admits(self, peer: Endpoint, namespaces: Mapping[str, Mapping[str, str]]) -> bool:
        """Return True if the other end is a peer of the rule; without peers everyone is."""
        return not self.peers or any(self._is(given, peer, namespaces) for given in self.peers)

    def _is(self, given: Manifest, peer: Endpoint, namespaces: Mapping[str, Mapping[str, str]]) -> bool:
        if "ipBlock" in given:
            return in_block(given["ipBlock"], peer.ip)
        if not peer.is_pod:
            return False
        spaces = given.get("namespaceSelector")
        if spaces is None:
            there = peer.namespace == self.namespace
        else:
            there = selects(spaces, namespaces.get(peer.namespace, {}))
        return there and selects(given.get("podSelector") or {}, peer.labels or {})

    def uses(
        self, destination: Endpoint, peer: Endpoint, port: int, spaces: Mapping[str, Mapping[str, str]]
    ) -> tuple[list[int], list[int]]:
        """Return the indices of the peers and of the ports that a connection uses."""
        peers = [place for place, given in enumerate(self.peers) if self._is(given, peer, spaces)]
        ranges = [(place, given.numbers(destination)) for place, given in enumerate(self.ports)]
        return peers, [place for place, result in ranges if result and result[0] <= port <= result[1]]

    def opens(self, destination: Endpoint, protocol: str, port: int) -> bool:
        if not self.ports:
            return True
        ranges = [given.numbers(destination) for given in self.ports if given.protocol == protocol]
        return any(result and result[0] <= port <= result[1] for result in ranges)


@dataclass(frozen=True, slots=True)
class Policies:
    """All policies; `guarded` are the (selector, namespace, direction) that are closed by default."""

    openings: tuple[Opening, ...]
    guarded: tuple[tuple[Manifest, str, str], ...]
    namespaces: Mapping[str, Mapping[str, str]]

    def is_guarded(self, pod: Endpoint, direction: str) -> bool:
        return pod.is_pod and any(
            of == direction and namespace == pod.namespace and selects(selector, pod.labels or {})
            for selector, namespace, of in self.guarded
        )

    def of(self, pod: Endpoint, direction: str) -> Iterator[Opening]:
        return (o for o in self.openings if o.direction == direction and o.guards(pod))

    def leave(
        self, source: Endpoint, destination: Endpoint, protocol: str, port: int
    ) -> tuple[bool, tuple[Opening, ...]]:
        used: list[Opening] = []
        for pod, peer, direction in ((source, destination, EGRESS), (destination, source, INGRESS)):
            if not self.is_guarded(pod, direction):
                continue
            through = [
                opening
                for opening in self.of(pod, direction)
                if opening.admits(peer, self.namespaces) and opening.opens(destination, protocol, port)
            ]
            if not through:
                return False, ()
            used += through
        return True, tuple(used)


def read_policies(manifests: Iterable[Manifest], namespaces: Mapping[str, Mapping[str, str]]) -> Policies:
    openings: list[Opening] = []
    guarded: list[tuple[Manifest, str, str]] = []
    for manifest in manifests:
        metadata, spec = manifest["metadata"], manifest["spec"]
        selector = spec.get("podSelector") or {}
        for direction in _directions(spec):
            guarded.append((selector, metadata["namespace"], direction))
            rules = spec.get(direction) or []
            openings += [
                Opening(
                    metadata["name"],
                    metadata["namespace"],
                    direction,
                    index,
                    selector,
                    tuple((rule or {}).get(_PEERS[direction]) or ()),
                    tuple(_port(port) for port in (rule or {}).get("ports") or ()),
                )
                for index, rule in enumerate(rules)
            ]
    return Policies(tuple(openings), tuple(guarded), namespaces)


def selects(selector: Manifest, labels: Mapping[str, str]) -> bool:
    """Return True if a label selector matches; an empty one matches all."""
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    return all(_holds(expression, labels) for expression in selector.get("matchExpressions") or ())


def in_block(block: Manifest, address: str) -> bool:
    ip = ip_address(address)
    if ip not in ip_network(block["cidr"]):
        return False
    return not any(ip in ip_network(cidr) for cidr in block.get("except") or ())


def labels_for(selector: Manifest | None) -> dict[str, str]:
    """Return the fewest labels that a selector matches."""
    selector = selector or {}
    result = dict(selector.get("matchLabels") or {})
    for expression in selector.get("matchExpressions") or ():
        match expression["operator"]:
            case "In":
                result[expression["key"]] = expression["values"][0]
            case "Exists":
                result.setdefault(expression["key"], "any")
            case _:
                pass
    return result


def _directions(spec: Manifest) -> Sequence[str]:
    data = spec.get("policyTypes")
    if data is not None:
        return [str(direction).lower() for direction in data]
    return [INGRESS, EGRESS] if spec.get("egress") else [INGRESS]


def _port(port: Manifest) -> Port:
    return Port(port.get("protocol", "TCP"), port.get("port"), port.get("endPort"))


def _holds(expression: Manifest, labels: Mapping[str, str]) -> bool:
    key = expression["key"]
    match expression["operator"]:
        case "In":
            return labels.get(key) in expression["values"]
        case "NotIn":
            return labels.get(key) not in expression["values"]
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
        case other:
            raise ValueError(f"matchExpressions: {other!r} is no operator")
