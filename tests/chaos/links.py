"""Put every link of a stack behind a relay, so that it can be slow, lossy or cut off while the stack runs.

All gateways use one address of a replica. The process that holds the other end of a connection tells which
gateway it belongs to, so one gateway can lose a replica that the other still reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Self

import psutil

from galley.stack.parts import stack_parts
from galley.stack.stack import Facts, PartSpec, Stack, StackDirs, StackOptions
from tests.chaos.store_files import StoreClock
from tests.fakes.link import Link
from tests.fakes.relay import Relay

GATEWAYS = ("gateway", "gateway-2")
REPLICAS = ("target", "target-2", "draft", "draft-2")
STORE = "valkey"
PARTS = (*GATEWAYS, *REPLICAS, STORE)
CLIENT = "client"

Ends = tuple[str, str]
"""The ends of a link: the calling part and the called one."""

LINKS: tuple[Ends, ...] = (
    *((CLIENT, gateway) for gateway in GATEWAYS),
    *((gateway, replica) for gateway in GATEWAYS for replica in REPLICAS),
    *((part, STORE) for part in (*GATEWAYS, *REPLICAS)),
)


class Links:
    """The relays of all links, open within `async with`; `of` connects them to a stack."""

    def __init__(self, seed: int, clock: StoreClock) -> None:
        self.clock = clock
        self._links = {ends: Link(seed=seed + number) for number, ends in enumerate(LINKS)}
        self._stack: Stack | None = None
        self._relays: dict[str, Relay] = {}
        self._http: dict[str, Relay] = {}
        self._to_store: dict[str, Relay] = {}
        self._held = AsyncExitStack()

    def __getitem__(self, ends: Ends) -> Link:
        return self._links[ends]

    def ports(self, ends: Ends) -> tuple[int, ...]:
        """Return the ports of the relays that only this link uses, of clients or to the store."""
        source, to = ends
        relays = (self._relays[to], self._http[to]) if source == CLIENT else (self._to_store[source],)
        return tuple(int(relay.address.rpartition(":")[2]) for relay in relays)

    def store_url(self, part: str) -> str:
        """Return the URL at which a part reaches the store."""
        return f"redis://{self._to_store[part].address}"

    async def __aenter__(self) -> Self:
        for gateway in GATEWAYS:
            self._relays[gateway] = await self._relay(gateway, self[CLIENT, gateway])
            self._http[gateway] = await self._relay(gateway, self[CLIENT, gateway], "http")
        for replica in REPLICAS:
            self._relays[replica] = await self._relay(replica, self._by_gateway(replica))
        for part in (*GATEWAYS, *REPLICAS):
            self._to_store[part] = await self._relay(STORE, self[part, STORE])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._held.aclose()

    async def _relay(self, to: str, link: Link | Callable[[int], Link], fact: str = "address") -> Relay:
        return await self._held.enter_async_context(Relay(lambda: self._at(to, fact), link))

    def _at(self, part: str, fact: str) -> str:
        """Return an address of a part. Raise LookupError before there is a stack."""
        if self._stack is None:
            raise LookupError(part)
        return str(self._stack.facts(part)[fact])

    def _by_gateway(self, replica: str) -> Callable[[int], Link]:
        return lambda port: self[self._gateway_at(port), replica]

    def _gateway_at(self, port: int) -> str:
        """Return the gateway that connects from `port`. Raise LookupError if none does, or has just died."""
        if (stack := self._stack) is not None:
            for gateway in GATEWAYS:
                if gateway in stack.running and _has_port(stack.pid(gateway), port):
                    return gateway
        raise LookupError(port)

    def of(self, stack: Stack) -> None:
        """Connect the relays to the parts of `stack`."""
        self._stack = stack

    @property
    def fronts(self) -> tuple[str, ...]:
        """Return the addresses at which clients reach the gateways."""
        return tuple(self._relays[gateway].address for gateway in GATEWAYS)

    @property
    def http_fronts(self) -> tuple[str, ...]:
        """Return the addresses at which clients reach the gateways' HTTP ports."""
        return tuple(self._http[gateway].address for gateway in GATEWAYS)

    def parts(self, asked: StackOptions, dirs: StackDirs) -> Sequence[PartSpec]:
        """Return the parts of a stack, configured to use the relays."""
        return [self._placed(spec) for spec in stack_parts(asked, dirs)]

    def _placed(self, spec: PartSpec) -> PartSpec:
        if spec.name == STORE:
            return replace(spec, environment=lambda _: self.clock.environment)
        return self._behind(spec) if spec.name in self._to_store else spec

    def _behind(self, spec: PartSpec) -> PartSpec:
        def command(facts: Facts) -> list[str]:
            words = list(spec.command(facts))
            words[words.index("--redis-url") + 1] = self.store_url(spec.name)
            if spec.name in REPLICAS:
                words += ["--advertise", self._relays[spec.name].address]
            return words

        # At a low priority, drafts would take long to restart; without a model they need little CPU.
        return replace(spec, command=command, niceness=0)


def _has_port(pid: int, port: int) -> bool:
    try:
        return any(one.laddr.port == port for one in psutil.Process(pid).net_connections("tcp"))
    except psutil.Error:  # the process has just died
        return False
