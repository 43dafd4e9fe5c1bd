"""What a trial writes down of its cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tests.proofs.boot.cluster import Cluster
from tests.proofs.boot.node import DNS
from tests.proofs.boot.oci import SECCOMP
from tests.proofs.boot.policies import INGRESS, Endpoint, Opening, Policies
from tests.proofs.boot.ruleset import Connection, Traffic


async def told_of(cluster: Cluster) -> dict[str, Any]:
    """Everything that happened, who connected to whom, and which openings let them."""
    traffic = await cluster.node.traffic()
    ends = {DNS.ip: DNS} | {end.ip: end for end in cluster.seen}
    return {
        "began_s": cluster.began,
        "workloads": {name: made.replicas for name, made in cluster.objects.workloads().items()},
        "owners": cluster.owners,
        "groups": cluster.groups,
        "events": [event.told() for event in cluster.events],
        "filters": SECCOMP.exists(),
        "probes": dict(sorted(cluster.node.probes.items())),
        "unknown_names": sorted(cluster.unknown_names),
        "namespace": cluster.objects.namespace,
        "services": sorted(service["metadata"]["name"] for service in cluster.objects.of("Service")),
        "made": [_told(connection, ends, cluster.policies) for connection in sorted(traffic.made)],
        "refused": [_told(connection, ends, cluster.policies) for connection in sorted(traffic.refused)],
        "openings": _openings(cluster.policies, traffic),
    }


def _told(connection: Connection, ends: Mapping[str, Endpoint], policies: Policies) -> dict[str, Any]:
    """A connection with the names of its ends, and the openings that let it through; None: nothing does."""
    source, destination = (
        ends.get(ip, Endpoint(ip, ip)) for ip in (connection.source, connection.destination)
    )
    may, through = policies.leave(source, destination, connection.protocol, connection.port)
    uses = [
        part for opening in through for part in _parts(opening, source, destination, connection, policies)
    ]
    return {
        "source": source.name,
        "destination": destination.name,
        "protocol": connection.protocol,
        "port": connection.port,
        "through": [opening.name for opening in through] if may else None,
        "uses": uses,
    }


def _parts(
    opening: Opening, source: Endpoint, destination: Endpoint, connection: Connection, policies: Policies
) -> Iterator[str]:
    """The opening, and its peers and ports that the connection needs: named as in `_openings`."""
    peer = source if opening.direction == INGRESS else destination
    peers, ports = opening.uses(destination, peer, connection.port, policies.namespaces)
    yield opening.name
    yield from (f"{opening.name} peer {place}" for place in peers)
    yield from (
        f"{opening.name} port {opening.ports[place]}"
        for place in ports
        if opening.ports[place].protocol == connection.protocol
    )


def _openings(policies: Policies, traffic: Traffic) -> list[dict[str, Any]]:
    return [
        {
            "name": opening.name,
            "peers": list(opening.peers),
            "ports": [str(port) for port in opening.ports],
            "parts": [
                opening.name,
                *(f"{opening.name} peer {place}" for place in range(len(opening.peers))),
                *(f"{opening.name} port {port}" for port in opening.ports),
            ],
            "packets": traffic.packets.get(opening.name, 0),
        }
        for opening in policies.openings
    ]
