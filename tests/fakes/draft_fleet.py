"""Several fake drafts that register themselves, as real ones do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from galley.common.registry.leases import DRAFT_POOL, ReplicaRegistry, draft_lease
from galley.common.registry.registration import Registration, start_registration
from galley.core.routing.choice import DraftLease
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.replicas import FakeDraft
from tests.fakes.target_fleet import LEASE_S
from tests.fakes.waiting import PATIENCE_S, Gate

if TYPE_CHECKING:
    from tests.fakes.world import World


class Freezing(FakeDraft):
    """A draft that can hang: connections stay open, and nothing answers, not even who it is."""

    thawed: Gate

    def freeze(self) -> None:
        self.thawed.close()
        self.gate.close()

    def thaw(self) -> None:
        self.thawed.open()
        self.gate.open()

    async def GetDraftInfo(self, request: pb.GetDraftInfoRequest, context: Any) -> pb.GetDraftInfoResponse:
        await self.thawed.enter()
        return await super().GetDraftInfo(request, context)


@dataclass
class FleetDraft:
    """A fake draft and what its lease says beyond what GetDraftInfo does."""

    fake: Freezing
    url: str
    busy: int = 0
    registration: Registration[DraftLease] | None = field(default=None, repr=False)

    @property
    def sessions(self) -> set[str]:
        """Those that it was asked about."""
        return {call.slice.session_id for call in self.fake.calls}

    def register(self) -> None:
        self.registration = start_registration(self.url, DRAFT_POOL, self._lease, lease_s=LEASE_S)

    async def withdraw(self) -> None:
        registration, self.registration = self.registration, None
        if registration is not None:
            await registration.close()

    def _lease(self) -> DraftLease:
        return draft_lease(self.fake.address, self.fake.info(), sessions=self.busy)


class DraftFleet:
    """Drafts a and b, and more where asked for; use as an async context."""

    def __init__(self, world: World, names: str = "ab") -> None:
        self._registry = ReplicaRegistry(world.redis_url)
        self.drafts: list[FleetDraft] = []
        for name in names:
            directory = world.directory / f"draft-{name}"
            directory.mkdir()
            fake = Freezing(directory, world.tokenizer_hash)
            fake.thawed = Gate()
            self.drafts.append(FleetDraft(fake, world.redis_url))

    @property
    def addresses(self) -> str:
        return ",".join(draft.fake.address for draft in self.drafts)

    async def register(self, *drafts: FleetDraft) -> None:
        """Register these, or all, and wait until the registry tells of them."""
        chosen = drafts or tuple(self.drafts)
        for draft in chosen:
            draft.register()
        addresses = {draft.fake.address for draft in chosen}
        await self.until(lambda leases: addresses <= {lease.address for lease in leases})

    def holder(self) -> tuple[FleetDraft, FleetDraft]:
        """The one of two that was asked, and the other."""
        first, second = self.drafts
        return (first, second) if first.fake.calls else (second, first)

    async def until(self, holds: Callable[[list[DraftLease]], bool]) -> None:
        """Wait until the registry reads so."""
        async with asyncio.timeout(PATIENCE_S):
            while not holds(await self._registry.read(DRAFT_POOL)):
                pass

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opened:
            for draft in self.drafts:
                await draft.fake.start()
                opened.push_async_callback(draft.fake.stop)
            self._opened = opened.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        for draft in self.drafts:
            draft.fake.thaw()
            await draft.withdraw()
        await self._registry.close()
        await self._opened.aclose()
