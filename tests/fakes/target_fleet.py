"""Several fake targets that register themselves, as real ones do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from galley.common.registry.leases import TARGET_POOL, ReplicaRegistry, target_lease
from galley.common.registry.registration import Registration, start_registration
from galley.core.content import block_hashes
from galley.core.routing.choice import TargetLease
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.replicas import FakeTarget
from tests.fakes.waiting import PATIENCE_S

if TYPE_CHECKING:
    from tests.fakes.world import World

BLOCK = 4
LEASE_S = 1.5


@dataclass
class FleetTarget:
    """A fake target and what its lease says beyond what GetTargetInfo does."""

    fake: FakeTarget
    url: str
    queue_depth: int = 0
    free: int = 50
    cached: Sequence[int] = ()
    registration: Registration[TargetLease] | None = field(default=None, repr=False)

    @property
    def sessions(self) -> set[str]:
        """Those that it was asked about."""
        return {call.slice.session_id for call in self.fake.calls}

    def register(self) -> None:
        self.registration = start_registration(self.url, TARGET_POOL, self._lease, lease_s=LEASE_S)

    async def withdraw(self) -> None:
        registration, self.registration = self.registration, None
        if registration is not None:
            await registration.close()

    async def stop(self) -> None:
        """Die: the lease ends by itself, later."""
        await self.fake.stop()

    def _lease(self) -> TargetLease:
        info = pb.GetTargetInfoResponse(
            model="tiny",
            tokenizer_hash=self.fake.tokenizer_hash,
            context_window=1 << 16,
            vocab_size=256,
            fingerprint=self.fake.fingerprint,
            incarnation=f"target-{self.fake.incarnations}",
            max_draft_tokens=16,
            kv_block_tokens=BLOCK,
            kv_blocks_free=self.free,
            kv_blocks_total=100,
            queue_depth=self.queue_depth,
        )
        return target_lease(self.fake.address, info, block_hashes(b"", self.cached, BLOCK))


class Fleet:
    """Targets a and b, and more where asked for; use as an async context."""

    def __init__(self, world: World, names: str = "ab", make: type[FakeTarget] = FakeTarget) -> None:
        self._registry = ReplicaRegistry(world.redis_url)
        self.targets: list[FleetTarget] = []
        for name in names:
            (world.directory / name).mkdir()
            fake = make(world.directory / name, world.tokenizer_hash)
            self.targets.append(FleetTarget(fake, world.redis_url))

    async def register(self) -> None:
        """Register all, and wait until the registry tells of them."""
        for target in self.targets:
            target.register()
        await self.until(lambda leases: len(leases) == len(self.targets))

    def hold_after(self, answers: int) -> None:
        """Each of them answers so often, and then not until its gate is opened."""
        for target in self.targets:
            target.fake.gate.close()
            target.fake.gate.permit(answers)

    async def until(self, holds: Callable[[list[TargetLease]], bool]) -> None:
        """Wait until the registry reads so."""
        async with asyncio.timeout(PATIENCE_S):
            while not holds(await self._registry.read(TARGET_POOL)):
                pass

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opened:
            for target in self.targets:
                await target.fake.start()
                opened.push_async_callback(target.fake.stop)
            self._opened = opened.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        for target in self.targets:
            target.fake.gate.open()
            await target.withdraw()
        await self._registry.close()
        await self._opened.aclose()
