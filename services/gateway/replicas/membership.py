"""The replicas of a pool that a gateway knows: found by the registry or told at start, met, refused, let go.

A replica is used once it was met and found to fit. One whose lease has ended gets no new sessions; a while
later those that it has are taken away. With the registry away, what was known stays.
"""

from __future__ import annotations

import asyncio
import contextvars
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import grpc

from galley.common.logs import get_logger
from galley.common.registry.leases import LeasePool, LeaseT, ReplicaRegistry
from galley.core.errors import GalleyError, TokenizerMismatch, Unavailable
from galley.core.routing.choice import ReplicaLease
from galley.core.session.ports import Clock, Replica
from services.gateway.replicas.clients import MEET_TIMEOUT_S
from services.gateway.session.timeouts import SECOND

POLL_S = 0.5
GONE_GRACE_S = 3.0
"""How long sessions stay where a lease has ended: a registry that lost its data has it back by then."""

_log = get_logger(__name__)


class Source(Protocol):
    """Where replicas are learnt of."""

    @property
    def changes(self) -> bool:
        """Whether it is worth asking again once all that it tells were met."""

    async def read(self) -> Mapping[str, ReplicaLease | None]:
        """Address and, where it is known without asking the replica, lease. Raises StoreUnavailable."""

    async def close(self) -> None:
        """Let go of connections."""


class Told:
    """Addresses that do not change. Of several, each is asked again and again how it is doing."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = dict.fromkeys(addresses)
        self.changes = len(self._addresses) > 1

    def __str__(self) -> str:
        return "at " + ", ".join(self._addresses)

    async def read(self) -> Mapping[str, ReplicaLease | None]:
        """See `Source`."""
        return self._addresses

    async def close(self) -> None:
        """Nothing to let go of."""


class Registered(Generic[LeaseT]):
    """The replicas of a pool in the registry."""

    changes = True

    def __init__(self, registry: ReplicaRegistry, pool: LeasePool[LeaseT]) -> None:
        self._registry = registry
        self._pool = pool

    def __str__(self) -> str:
        return "in the registry"

    async def read(self) -> Mapping[str, LeaseT | None]:
        """See `Source`."""
        return {lease.address: lease for lease in await self._registry.read(self._pool)}

    async def close(self) -> None:
        """See `Source`."""
        await self._registry.close()


class MemberPool(Protocol):
    """The stream to one replica."""

    @property
    def replica(self) -> Replica | None:
        """Who answers; None while nobody does, as far as is known."""

    @property
    def outdated(self) -> bool:
        """Whether it is to be met again, over a new connection."""

    async def meet(self, timeout_s: float) -> None:
        """Ask who serves there. Raises grpc.aio.AioRpcError, TokenizerMismatch or Unavailable."""

    def lost(self) -> None:
        """Whoever served there may be gone: it is to be met again."""

    async def close(self) -> None:
        """End the stream, which fails the items that are open."""


PoolT = TypeVar("PoolT", bound=MemberPool)


class Member(Generic[PoolT, LeaseT]):
    """One address as this gateway uses it."""

    def __init__(self, address: str, pool: PoolT, channel: grpc.aio.Channel) -> None:
        self.address = address
        self.pool = pool
        self.lease: LeaseT | None = None
        self.fits = False
        self.gone_since_ns: int | None = None
        self.checking: asyncio.Task[None] | None = None
        self._channel = channel

    @property
    def up(self) -> bool:
        """Its lease lives, and nothing has failed since it was last met."""
        return self.gone_since_ns is None and self.pool.replica is not None

    def must_meet(self) -> bool:
        """Whether it is not known who serves there, if anybody."""
        replica = self.pool.replica
        if replica is None or not self.up or self.pool.outdated:
            return True
        return self.lease is not None and self.lease.incarnation != replica.incarnation

    async def close(self) -> None:
        """End its stream, which fails the items that are open."""
        self.fits = False
        await _stop(self.checking)
        await self.pool.close()
        await self._channel.close(None)


MemberT = TypeVar("MemberT", bound="Member[Any, Any]")


class Members(ABC, Generic[MemberT]):
    """All replicas of a pool; `close` at the end."""

    sign_of_life_s = MEET_TIMEOUT_S
    """How long a silent replica may take to say who it is; it does so beside its work."""

    def __init__(
        self,
        kind: str,
        source: Source,
        tokenizer_hash: str,
        open_channel: Callable[[str], grpc.aio.Channel],
        clock: Clock,
    ) -> None:
        """`kind` is what a replica is called; `tokenizer_hash` is what it must have."""
        self._kind = kind
        self._source = source
        self._tokenizer_hash = tokenizer_hash
        self._open_channel = open_channel
        self._clock = clock
        self._members: dict[str, MemberT] = {}
        self._refusals: dict[str, GalleyError] = {}
        self._problem = "none is there"
        self._unread = ""
        self._refreshing: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def problem(self) -> str:
        """Why there is no replica, in words."""
        return f"no {self._kind} {self._source}: {self._problem}"

    def up_and_down(self) -> tuple[int, int]:
        """How many that were met may be asked, and how many others are known."""
        up = sum(member.fits and member.up for member in self._members.values())
        return up, len(self._members) - up

    @property
    def mismatch(self) -> TokenizerMismatch | None:
        """Why each of those that are there was refused, if it was its tokenizer; of several, any."""
        if self._members:
            return None
        return next((it for it in self._refusals.values() if isinstance(it, TokenizerMismatch)), None)

    async def refresh(self) -> None:
        """Look now who is there; together with whoever else asks."""
        await asyncio.shield(self.look())

    def look(self) -> asyncio.Task[None]:
        """The same, without waiting for it."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = _of_all(self._refresh())
        return self._refreshing

    def doubt(self, member: MemberT) -> None:
        """It was silent for too long: ask whether it lives. If not, its open items fail."""
        if member.checking is None or member.checking.done():
            member.checking = _of_all(self._check(member))

    async def _check(self, member: MemberT) -> None:
        if not member.fits:  # let go meanwhile
            return
        try:
            await member.pool.meet(self.sign_of_life_s)
            lives = self._fault_of(member) is None
        except (grpc.aio.AioRpcError, GalleyError):
            lives = False
        if not lives:
            member.pool.lost()
            await member.pool.close()  # its open items fail, and their sessions go elsewhere
            self.look()

    async def close(self) -> None:
        """Let go of everything."""
        await _stop(self._watching, *(member.checking for member in self._members.values()))
        await _stop(self._refreshing)  # which those may have begun
        for address in list(self._members):
            await self._drop(address)
        await self._source.close()

    # ------------------------------------------------------------------- what a pool is like --

    @abstractmethod
    def _member(self, address: str) -> MemberT:
        """A member at this address, not met."""

    @abstractmethod
    def _fault_of(self, member: MemberT) -> GalleyError | None:
        """What keeps a replica that was met from serving here."""

    @abstractmethod
    def _wrong_tokenizer(self, its_hash: str) -> TokenizerMismatch:
        """Of a replica whose tokenizer is another."""

    @abstractmethod
    def _tell(self) -> None:
        """What is known of the replicas may have changed."""

    # -------------------------------------------------------------------------------- looking --

    def _watch(self) -> None:
        """From now on, look twice a second."""
        self._watching = asyncio.create_task(self._keep_looking())

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await self.refresh()

    async def _refresh(self) -> None:
        try:
            found = await self._source.read()
        except GalleyError as error:
            self._cannot_look(error)
            return
        self._unread = ""
        await self._let_go({address for address, lease in found.items() if self._note(address, lease)})
        await asyncio.gather(*(self._meet(member) for member in self._members.values() if member.must_meet()))
        self._tell()

    def _cannot_look(self, error: GalleyError) -> None:
        """Who is there cannot be found out. Logged once for each reason, of which clients read a part."""
        self._problem = error.public_message
        if self._unread != str(error):
            self._unread = str(error)
            _log.warning(f"cannot find out which {self._kind}s there are", problem=self._unread)

    def _note(self, address: str, lease: ReplicaLease | None) -> bool:
        """Whether a replica that is there may be of use."""
        if lease is not None and lease.tokenizer_hash != self._tokenizer_hash:
            self._refuse(address, self._wrong_tokenizer(lease.tokenizer_hash))
            return False
        if address not in self._members:
            self._members[address] = self._member(address)
        member = self._members[address]
        member.lease = lease
        member.gone_since_ns = None
        return True

    async def _let_go(self, found: Collection[str]) -> None:
        now = self._clock.now_ns()
        for address, member in list(self._members.items()):
            if address in found:
                continue
            if member.gone_since_ns is None:
                member.gone_since_ns = now
            if now - member.gone_since_ns >= GONE_GRACE_S * SECOND:
                _log.info(f"a {self._kind}'s lease has ended", address=address)
                await self._drop(address)

    async def _meet(self, member: MemberT) -> None:
        try:
            await member.pool.meet(MEET_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            self._problem = f"{member.address}: {error.details()}"
            member.pool.lost()
            return
        except (TokenizerMismatch, Unavailable) as error:
            fault: GalleyError | None = error
        else:
            fault = self._fault_of(member)
        if fault is None:
            member.fits = True
            self._refusals.pop(member.address, None)
        else:
            self._refuse(member.address, fault)
            await self._drop(member.address)

    def _refuse(self, address: str, fault: GalleyError) -> None:
        """Said once for each reason."""
        self._problem = str(fault)
        if str(self._refusals.get(address)) != str(fault):
            self._refusals[address] = fault
            _log.error(f"{self._kind} refused", address=address, reason=str(fault))

    async def _drop(self, address: str) -> None:
        member = self._members.pop(address, None)
        if member is not None:
            await member.close()


def _of_all(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Not in the context of the session that happened to need it: its span and log fields are its own."""
    return asyncio.create_task(work, context=contextvars.Context())


async def _stop(*tasks: asyncio.Task[None] | None) -> None:
    """Cancel them, and return once they are over."""
    begun = [task for task in tasks if task is not None]
    for task in begun:
        task.cancel()
    await asyncio.gather(*begun, return_exceptions=True)
