"""The target replicas that a gateway knows: found by the registry or told at start, met, refused, let go.

A replica is used once it was met and found to fit: it has the gateway's tokenizer, and the vocabulary and
draft length of those met before. One whose lease has ended gets no new sessions; a while later those that it
has are taken away. With the registry away, what was known stays.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Protocol

import grpc

from services.common.logs import get_logger
from services.common.pb.galley.v1 import galley_pb2 as pb
from services.common.registry import TARGET_POOL, lease_of
from services.core.errors import GalleyError, TargetUnavailable, TokenizerMismatch, Unavailable
from services.core.routing import Candidate, Wanted, choose
from services.gateway.patience import SECOND
from services.gateway.pools import TargetPool

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from services.common.registry import ReplicaRegistry
    from services.core.ports import Clock
    from services.core.routing import ReplicaLease

POLL_S = 0.5
GONE_GRACE_S = 3.0
"""How long sessions stay where a lease has ended: a registry that lost its data has it back by then."""
_FIRST_PAUSE_S = 0.1
_MEET_TIMEOUT_S = 1.0

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


class Registered:
    """The replicas in the registry."""

    changes = True

    def __init__(self, registry: ReplicaRegistry) -> None:
        self._registry = registry

    def __str__(self) -> str:
        return "in the registry"

    async def read(self) -> Mapping[str, ReplicaLease | None]:
        """See `Source`."""
        return {lease.address: lease for lease in await self._registry.read(TARGET_POOL)}

    async def close(self) -> None:
        """See `Source`."""
        await self._registry.close()


class Member:
    """One address as this gateway uses it; `items` counts the gateway's own that are open there."""

    def __init__(self, address: str, channel: grpc.aio.Channel, came_back: Callable[[], None]) -> None:
        self.address = address
        self.pool = TargetPool(channel, address, came_back)
        self.lease: ReplicaLease | None = None
        self.items = 0
        self.fits = False
        self.gone_since_ns: int | None = None
        self._channel = channel

    @property
    def up(self) -> bool:
        """Its lease lives, and nothing has failed since it was last met."""
        return self.gone_since_ns is None and self.pool.replica is not None

    @property
    def fingerprint(self) -> str:
        """Of its build, as it was last told."""
        return self.candidate().lease.fingerprint

    def candidate(self) -> Candidate:
        """As routing sees it."""
        return Candidate(self.lease or lease_of(self.address, self.pool.info), self.items, self.up)

    def must_meet(self) -> bool:
        """Whether it is not known who serves there, or, without a lease, how it is doing."""
        return not self.up or self.lease is None or self.lease.incarnation != self.pool.info.incarnation

    async def close(self) -> None:
        """End its stream, which fails the items that are open."""
        self.fits = False
        await self.pool.close()
        await self._channel.close(None)


class Targets:
    """All replicas; `start` once, `close` at the end."""

    def __init__(
        self,
        source: Source,
        tokenizer_hash: str,
        open_channel: Callable[[str], grpc.aio.Channel],
        clock: Clock,
        max_draft_tokens: int,
    ) -> None:
        """`max_draft_tokens` is the most that the gateway would ask for."""
        self.info = pb.GetTargetInfoResponse()
        self._source = source
        self._tokenizer_hash = tokenizer_hash
        self._open_channel = open_channel
        self._clock = clock
        self._max_draft_tokens = max_draft_tokens
        self._members: dict[str, Member] = {}
        self._refusals: dict[str, GalleyError] = {}
        self._problem = "none is there"
        self._refreshing: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def problem(self) -> str:
        """Why there is no replica, in words."""
        return f"no target {self._source}: {self._problem}"

    async def start(self, timeout_s: float) -> None:
        """Wait for the first replica. Raises TargetUnavailable, or TokenizerMismatch if all are refused."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._first()
        except TimeoutError as error:
            raise TargetUnavailable(self.problem) from error
        if self._source.changes:
            self._watching = asyncio.create_task(self._watch())

    async def _first(self) -> None:
        while True:
            await self.refresh()
            if any(member.fits for member in self._members.values()):
                return
            for error in self._refusals.values():
                if not self._members and isinstance(error, TokenizerMismatch):
                    raise error
            await asyncio.sleep(_FIRST_PAUSE_S)

    def choose(self, wanted: Wanted, avoid: Collection[str]) -> Member | None:
        """The replica that a session is best served by; None if none can."""
        candidates = [member.candidate() for member in self._members.values() if member.fits]
        chosen = choose(wanted, candidates, avoid)
        return None if chosen is None else self._members[chosen.lease.address]

    async def refresh(self) -> None:
        """Look now who is there; together with whoever else asks."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._refresh())
        await asyncio.shield(self._refreshing)

    async def close(self) -> None:
        """Let go of everything."""
        tasks = [task for task in (self._watching, self._refreshing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for address in list(self._members):
            await self._drop(address)
        await self._source.close()

    # -------------------------------------------------------------------------------- looking --

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await self.refresh()

    async def _refresh(self) -> None:
        try:
            found = await self._source.read()
        except GalleyError as error:
            self._problem = str(error)
            return
        await self._let_go({address for address, lease in found.items() if self._note(address, lease)})
        await asyncio.gather(*(self._meet(member) for member in self._members.values() if member.must_meet()))
        self._tell()

    def _note(self, address: str, lease: ReplicaLease | None) -> bool:
        """Whether a replica that is there may be of use."""
        if lease is not None and lease.tokenizer_hash != self._tokenizer_hash:
            self._refuse(address, self._mismatch(lease.tokenizer_hash))
            return False
        if address not in self._members:
            self._members[address] = Member(address, self._open_channel(address), self._tell)
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
                _log.info("a target's lease has ended", address=address)
                await self._drop(address)

    async def _meet(self, member: Member) -> None:
        try:
            await member.pool.meet(_MEET_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            self._problem = f"{member.address}: {error.details()}"
            member.pool.lost()
            return
        except (TokenizerMismatch, Unavailable) as error:
            fault: GalleyError | None = error
        else:
            fault = self._fault_of(member.pool.info)
        if fault is None:
            member.fits = True
            self._refusals.pop(member.address, None)
        else:
            self._refuse(member.address, fault)
            await self._drop(member.address)

    def _fault_of(self, info: pb.GetTargetInfoResponse) -> GalleyError | None:
        """What keeps a replica from serving the same requests as those that were met before."""
        if info.tokenizer_hash != self._tokenizer_hash:
            return self._mismatch(info.tokenizer_hash)
        if self.info.vocab_size not in {0, info.vocab_size}:
            return Unavailable(f"its vocabulary is {info.vocab_size}, the others' {self.info.vocab_size}")
        needed = min(self._max_draft_tokens, self.info.max_draft_tokens)
        if info.max_draft_tokens < needed:
            return Unavailable(f"it takes {info.max_draft_tokens} draft tokens, and {needed} may come")
        return None

    def _mismatch(self, target_hash: str) -> TokenizerMismatch:
        return TokenizerMismatch(self._tokenizer_hash, target_hash, "gateway")

    def _refuse(self, address: str, fault: GalleyError) -> None:
        """Said once for each reason."""
        self._problem = str(fault)
        if str(self._refusals.get(address)) != str(fault):
            self._refusals[address] = fault
            _log.error("target refused", address=address, reason=str(fault))

    async def _drop(self, address: str) -> None:
        member = self._members.pop(address, None)
        if member is not None:
            await member.close()

    # -------------------------------------------------------------------------------- telling --

    def _tell(self) -> None:
        """`info` as all replicas that are up can keep it; with none, as it was."""
        infos = [member.pool.info for member in self._members.values() if member.fits and member.up]
        if infos:
            self.info = _merged(infos)


def _merged(infos: Sequence[pb.GetTargetInfoResponse]) -> pb.GetTargetInfoResponse:
    """What holds for all; of builds, the one that most replicas run."""
    merged = pb.GetTargetInfoResponse()
    [(fingerprint, _)] = Counter(info.fingerprint for info in infos).most_common(1)
    merged.CopyFrom(next(info for info in infos if info.fingerprint == fingerprint))
    merged.context_window = min(info.context_window for info in infos)
    merged.max_draft_tokens = min(info.max_draft_tokens for info in infos)
    merged.deterministic = all(info.deterministic for info in infos)
    return merged
