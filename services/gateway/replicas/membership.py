"""Track the replicas of a pool: discover, meet, accept or refuse, and remove them.

A replica is used once it was met and accepted. One whose lease has expired gets no new sessions; after
LEASE_GRACE_S its sessions move. While the registry is unavailable, the known replicas stay.
"""

from __future__ import annotations

import asyncio
import contextvars
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import grpc

from galley.common.logs import get_logger
from galley.common.registry.leases import LeasePool, LeaseT, ReplicaRegistry
from galley.common.repeated_work import RepeatedWork
from galley.core.errors import GalleyError, TokenizerMismatch, Unavailable
from galley.core.names import MOVE_RESTARTED
from galley.core.routing.choice import ReplicaLease
from galley.core.session.events import Clock, Replica
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.clock import SECOND
from services.gateway.replicas.clients import MEET_TIMEOUT_S, ReplicaClient
from services.gateway.telemetry.observer import request_observer

POLL_S = 0.5
LEASE_GRACE_S = 3.0
"""Time for which sessions stay at a replica whose lease expired: it renews a lease that the registry lost."""

_log = get_logger(__name__)


class AddressSource(Protocol):
    @property
    def can_change(self) -> bool:
        """Return True if a later read may differ, or the replicas must be polled for their load."""

    async def read(self) -> Mapping[str, ReplicaLease | None]:
        """Return each address with its lease, if there is one. Raise StoreUnavailable."""

    async def close(self) -> None: ...


class StaticAddresses:
    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = dict.fromkeys(addresses)
        self.can_change = len(self._addresses) > 1  # several are polled for their load

    def __str__(self) -> str:
        return "at " + ", ".join(self._addresses) if self._addresses else "configured"

    async def read(self) -> Mapping[str, ReplicaLease | None]:
        return self._addresses

    async def close(self) -> None: ...


class RegisteredAddresses(Generic[LeaseT]):
    can_change = True

    def __init__(self, registry: ReplicaRegistry, pool: LeasePool[LeaseT]) -> None:
        self._registry = registry
        self._pool = pool

    def __str__(self) -> str:
        return "in the registry"

    async def read(self) -> Mapping[str, LeaseT | None]:
        return {lease.address: lease for lease in await self._registry.read(self._pool)}

    async def close(self) -> None:
        await self._registry.close()


ClientT = TypeVar("ClientT", bound=ReplicaClient[Any, Any])


class PoolReplica(Generic[ClientT, LeaseT]):
    """One address of a pool. `is_accepted` becomes True once its replica has described itself and fits."""

    def __init__(self, address: str, client: ClientT, channel: grpc.aio.Channel) -> None:
        self.address = address
        self.client = client
        self.lease: LeaseT | None = None
        self.is_accepted = False
        self.gone_since_ns: int | None = None
        self.probe: asyncio.Task[None] | None = None
        self._channel = channel

    @property
    def is_up(self) -> bool:
        return self.gone_since_ns is None and self.client.replica is not None

    def is_unknown(self) -> bool:
        """Return True if it must be met to know which process serves there."""
        replica = self.client.replica
        if replica is None or not self.is_up or self.client.is_outdated:
            return True
        return self.lease is not None and self.lease.incarnation != replica.incarnation

    async def close(self) -> None:
        """End its stream, which fails its open requests."""
        self.is_accepted = False
        await _cancel(self.probe)
        await self.client.close()
        await self._channel.close(None)


ReplicaT = TypeVar("ReplicaT", bound="PoolReplica[Any, Any]")


class ReplicaPool(ABC, Generic[ReplicaT]):
    """All replicas of a role. Call `close` at the end."""

    probe_timeout_s = MEET_TIMEOUT_S
    """Time in which a silent replica must respond to a probe; other work does not delay the response."""

    def __init__(
        self,
        role: str,
        source: AddressSource,
        open_channel: Callable[[str], grpc.aio.Channel],
        clock: Clock,
    ) -> None:
        """`role` is "draft" or "target"."""
        self.role = role
        self.move_counts: Counter[str] = Counter()
        """Sessions that moved, by reason."""
        self._source = source
        self._open_channel = open_channel
        self._clock = clock
        self._replicas: dict[str, ReplicaT] = {}
        self._present: Collection[str] = ()
        """The addresses that the source had last, with those of replicas that are refused."""
        self._refusals: dict[str, GalleyError] = {}
        self._problem = ""
        self._read_error = ""
        self._refresh = RepeatedWork(f"refresh of the {role}s", self._try_to_refresh)
        self._refreshing: asyncio.Task[None] | None = None
        self._polling: asyncio.Task[None] | None = None

    @property
    def problem(self) -> str:
        return f"no {self.role} {self._source}" + (self._problem and f": {self._problem}")

    def up_and_down(self) -> tuple[int, int]:
        """Return how many replicas are up, and how many are known but are not, refused ones included."""
        up = sum(replica.is_accepted and replica.is_up for replica in self._replicas.values())
        return up, len(self._replicas.keys() | self._present) - up

    def hosts(self) -> list[pb.Host]:
        """Return the cores of the replicas that are up."""
        return [it.client.info.host for it in self._replicas.values() if it.is_accepted and it.is_up]

    @property
    def mismatch(self) -> TokenizerMismatch | None:
        """Return the tokenizer mismatch of a refused replica, None if there is none or replicas are left."""
        if self._replicas:
            return None
        return next((it for it in self._refusals.values() if isinstance(it, TokenizerMismatch)), None)

    def moved(self, session_id: str, source: Replica, to: Replica, reason: str) -> None:
        """Count, log and trace a session that `to` has served for the first time."""
        if source.address == to.address:
            reason = MOVE_RESTARTED
        self.move_counts[reason] += 1
        facts = {"pool": self.role, "source": source.address, "to": to.address, "reason": reason}
        _log.info("session moved", session_id=session_id, **facts)
        request_observer().moved(self.role, source.address, to.address, reason)

    async def refresh(self) -> None:
        """Read the source and meet new replicas; concurrent callers share one refresh."""
        await asyncio.shield(self.start_refresh())

    def start_refresh(self) -> asyncio.Task[None]:
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = _in_background(self._refresh.run())
        return self._refreshing

    def start_probe(self, replica: ReplicaT) -> None:
        """Check in the background whether a silent replica is alive; if not, fail its open requests."""
        if replica.probe is None or replica.probe.done():
            replica.probe = _in_background(self._probe(replica))

    async def _probe(self, replica: ReplicaT) -> None:
        if not replica.is_accepted:  # let go meanwhile
            return
        try:
            await replica.client.meet(self.probe_timeout_s)
        except (grpc.aio.AioRpcError, GalleyError):
            replica.client.lost()
            await replica.client.close()  # its open requests fail, and their sessions move
            self.start_refresh()

    async def close(self) -> None:
        await _cancel(self._polling, *(replica.probe for replica in self._replicas.values()))
        await _cancel(self._refreshing)  # which those may have started
        for address in list(self._replicas):
            await self._drop(address)
        await self._source.close()

    # ---------------------------------------------------------------------------- role-specific --

    @abstractmethod
    def _new_replica(self, address: str) -> ReplicaT: ...

    @abstractmethod
    def _fault_in(self, info: Any) -> GalleyError | None:
        """Return why a replica is refused, by its own description or its lease."""

    def _update(self) -> None: ...

    # ----------------------------------------------------------------------------------- refresh --

    def _start_polling(self) -> None:
        self._polling = asyncio.create_task(self._poll())

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await self.start_refresh()  # not shielded: `close` ends both

    async def _try_to_refresh(self) -> None:
        try:
            leases = await self._source.read()
        except GalleyError as error:
            self._read_failed(error)
            return
        self._read_error, self._present = "", leases.keys()
        await self._drop_missing({address for address, lease in leases.items() if self._note(address, lease)})
        if unknown := [it for it in self._replicas.values() if it.is_unknown()]:
            await asyncio.gather(*map(self._meet, unknown))
        self._update()

    def _read_failed(self, error: GalleyError) -> None:
        """Log a reason that is new; clients see only its public part."""
        self._problem = error.public_message
        if self._read_error != str(error):
            self._read_error = str(error)
            _log.warning("replica lookup failed", pool=self.role, error=self._read_error)

    def _note(self, address: str, lease: ReplicaLease | None) -> bool:
        """Add or update a replica; return False if its lease rules it out."""
        if lease is not None and (fault := self._fault_in(lease)) is not None:
            self._refuse(address, fault)
            return False
        if address not in self._replicas:
            self._replicas[address] = self._new_replica(address)
        replica = self._replicas[address]
        replica.lease = lease
        replica.gone_since_ns = None
        return True

    async def _drop_missing(self, present: Collection[str]) -> None:
        now = self._clock.now_ns()
        for address, replica in list(self._replicas.items()):
            if address in present:
                continue
            if replica.gone_since_ns is None:
                replica.gone_since_ns = now
            if now - replica.gone_since_ns >= LEASE_GRACE_S * SECOND:
                _log.info("replica lease expired", pool=self.role, address=address)
                await self._drop(address)

    async def _meet(self, replica: ReplicaT) -> None:
        try:
            await replica.client.meet(MEET_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            self._problem = f"{replica.address}: {error.details()}"
            replica.client.lost()
            return
        except (TokenizerMismatch, Unavailable) as error:
            self._refuse(replica.address, error)
            await self._drop(replica.address)
        else:
            replica.is_accepted = True
            self._refusals.pop(replica.address, None)

    def _refuse(self, address: str, fault: GalleyError) -> None:
        """Note why a replica is refused; log the reason if it is new."""
        self._problem = str(fault)
        if str(self._refusals.get(address)) != str(fault):
            self._refusals[address] = fault
            _log.error("replica refused", pool=self.role, address=address, reason=str(fault))

    async def _drop(self, address: str) -> None:
        replica = self._replicas.pop(address, None)
        if replica is not None:
            await replica.close()


def _in_background(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start a task outside the context of the session that needs it, with its span and log fields."""
    return asyncio.create_task(work, context=contextvars.Context())


async def _cancel(*tasks: asyncio.Task[None] | None) -> None:
    started = [task for task in tasks if task is not None]
    for task in started:
        task.cancel()
    await asyncio.gather(*started, return_exceptions=True)
