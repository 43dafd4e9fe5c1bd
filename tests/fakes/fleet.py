"""Several fake targets or drafts that register themselves, as real ones do."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, Generic, Self, TypeVar

from galley.common.registry.leases import (
    DEFAULT_POOL,
    DRAFT_POOL,
    TARGET_POOL,
    LeasePool,
    draft_lease,
    target_lease,
)
from galley.common.registry.registration import Registration, start_registration
from galley.core.admission.admission import ANONYMOUS_NAME
from galley.core.content import block_hashes
from galley.core.routing.choice import DraftLease, ReplicaLease, TargetLease
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.request.validate import tenant_salt_for
from tests.fakes.replicas import FakeDraft, FakeTarget
from tests.fakes.truth import VOCAB
from tests.fakes.waiting import Gate
from tests.fakes.world import ID_SECRET, World

FakeT = TypeVar("FakeT", bound="FakeTarget | FakeDraft")
MemberT = TypeVar("MemberT", bound="Member[Any]")
BLOCK = 4
LEASE_S = 1.5
SALT = tenant_salt_for(ANONYMOUS_NAME, ID_SECRET.encode())
"""That of callers without a key."""


class Member(Generic[FakeT]):
    pool: LeasePool[Any]
    pool_name = DEFAULT_POOL

    def __init__(self, fake: FakeT, redis_url: str) -> None:
        self.fake = fake
        self.registration: Registration[Any] | None = None
        self._redis_url = redis_url

    @property
    def sessions(self) -> set[str]:
        return {call.slice.session_id for call in self.fake.calls}

    def lease(self) -> ReplicaLease:
        raise NotImplementedError

    async def register(self) -> None:
        """Register; return when the registry has the lease."""
        self.registration = start_registration(
            self._redis_url, self.pool, self.lease, self.pool_name, lease_s=LEASE_S
        )
        await self.publish()

    async def publish(self, **facts: object) -> None:
        vars(self).update(facts)
        assert self.registration is not None
        await self.registration._publish()

    async def drain(self) -> None:
        assert self.registration is not None
        await self.registration.drain()

    async def withdraw(self) -> None:
        registration, self.registration = self.registration, None
        if registration is not None:
            await registration.close()

    async def leave(self) -> None:
        await self.withdraw()
        await self.fake.stop()


class FleetTarget(Member[FakeTarget]):
    pool = TARGET_POOL
    free = 50
    cached: Sequence[int] = ()
    salt = SALT
    context, block = 1 << 16, BLOCK

    def lease(self) -> TargetLease:
        info = pb.GetTargetInfoResponse(
            model=self.fake.model,
            weights_digest=self.fake.weights_digest,
            tokenizer_hash=self.fake.tokenizer_hash,
            context_window=self.context,
            vocab_size=VOCAB,
            fingerprint=self.fake.fingerprint,
            incarnation=f"target-{self.fake.incarnations}",
            max_draft_tokens=16,
            kv_block_tokens=self.block,
            kv_blocks_free=self.free,
            kv_blocks_total=100,
            queue_depth=self.fake.queue_depth,
            lora_adapters=self.fake.lora_adapters,
            grammar_kinds=self.fake.grammar_kinds,
        )
        return target_lease(self.fake.address, info, block_hashes(self.salt, self.cached, self.block))


class FreezingDraft(FakeDraft):
    """A draft that can hang: connections stay open and no call is answered."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.thawed = Gate()
        self.probes = 0

    def freeze(self) -> None:
        self.thawed.close()
        self.gate.close()

    def thaw(self) -> None:
        self.thawed.open()
        self.gate.open()

    async def GetDraftInfo(self, request: pb.GetDraftInfoRequest, context: Any) -> pb.GetDraftInfoResponse:
        self.probes += 1
        await self.thawed.enter()
        return await super().GetDraftInfo(request, context)


class FleetDraft(Member[FreezingDraft]):
    pool = DRAFT_POOL
    busy = 0

    def lease(self) -> DraftLease:
        return draft_lease(self.fake.address, self.fake.info(), sessions=self.busy)


class _Fleet(Generic[MemberT]):
    def __init__(self, members: list[MemberT]) -> None:
        self.members = members

    @property
    def addresses(self) -> str:
        return ",".join(member.fake.address for member in self.members)

    async def register(self) -> None:
        for member in self.members:
            await member.register()

    def holder(self) -> tuple[MemberT, MemberT]:
        first, second = self.members
        return (first, second) if first.fake.calls else (second, first)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opened:
            for member in self.members:
                await member.fake.start()
                opened.push_async_callback(member.fake.stop)
            self._opened = opened.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        for member in self.members:
            member.fake.gate.open()
            await member.withdraw()
        await self._opened.aclose()


class Fleet(_Fleet[FleetTarget]):
    def __init__(self, world: World, names: str = "ab", make: type[FakeTarget] = FakeTarget) -> None:
        super().__init__([])
        for name in names:
            (world.directory / name).mkdir()
            fake = make(world.directory / name, world.tokenizer_hash)
            self.members.append(FleetTarget(fake, world.redis_url))

    def hold_after(self, answers: int) -> None:
        for target in self.members:
            target.fake.gate.close_after(answers)


class DraftFleet(_Fleet[FleetDraft]):
    def __init__(self, world: World, names: str = "ab") -> None:
        super().__init__([])
        for name in names:
            directory = world.directory / f"draft-{name}"
            directory.mkdir()
            self.members.append(FleetDraft(FreezingDraft(directory, world.tokenizer_hash), world.redis_url))

    async def __aexit__(self, *given: object) -> None:
        for draft in self.members:
            draft.fake.thaw()
        await super().__aexit__(*given)
