"""The network of one node: a namespace for each pod, routed through the node's own, where the filter stands.

All of it lies within the namespaces of the node's process and is gone with it; addresses need not be free
anywhere else.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from tests.proofs.boot.commands import run
from tests.proofs.boot.ruleset import TABLE, Traffic, read_traffic

NODE_IP = "10.244.0.1"
DNS_IP = "10.96.0.10"
_NAMESPACES = Path("/run/netns")


def pod_ips() -> Iterator[str]:
    """Addresses for pods, each once."""
    return (f"10.244.{n // 250 + 1}.{n % 250 + 2}" for n in itertools.count())


def service_ips() -> Iterator[str]:
    """Addresses for Services."""
    return (f"10.96.1.{n}" for n in range(1, 255))


class Wires:
    """Open once, then attach pods."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._links: dict[str, str] = {}

    async def open(self) -> None:
        """Make the node a router with the name server's address."""
        # `ip netns add` creates this folder, but the mount comes before the first namespace.
        await run("mkdir", "-p", str(_NAMESPACES))
        await run("mount", "-t", "tmpfs", "tmpfs", str(_NAMESPACES))
        await run("ip", "link", "set", "lo", "up")
        await run("ip", "address", "add", f"{DNS_IP}/32", "dev", "lo")
        await run("tee", "/proc/sys/net/ipv4/ip_forward", stdin="1")

    async def attach(self, ip: str) -> Path:
        """A new namespace with this address; its path."""
        number = next(self._numbers)
        name, link = f"p{number}", f"pod{number}"
        self._links[ip] = name
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
        return _NAMESPACES / name

    async def detach(self, ip: str) -> None:
        """Take a namespace away, and its link with it."""
        await run("ip", "netns", "delete", self._links.pop(ip))

    async def filter(self, rules: str) -> None:
        """Take over a ruleset in one transaction."""
        await run("nft", "-f", "-", stdin=rules)

    async def traffic(self) -> Traffic:
        """What was seen so far."""
        return read_traffic(json.loads(await run("nft", "-j", "list", "table", *TABLE.split())))
