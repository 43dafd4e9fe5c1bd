"""What a gateway needs of its targets before it begins to serve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import grpc

from galley.core.routing.choice import TargetLease
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.clock import MonotonicClock
from services.gateway.replicas.targets import TargetPool
from tests.fakes.replicas import FakeTarget
from tests.fakes.target_fleet import Fleet
from tests.fakes.truth import VOCAB
from tests.fakes.waiting import PATIENCE_S

if TYPE_CHECKING:
    from tests.fakes.world import World


class _Shy(FakeTarget):
    """Refuses to say who it is, the first time."""

    asked = 0

    async def GetTargetInfo(self, request: pb.GetTargetInfoRequest, context: Any) -> pb.GetTargetInfoResponse:
        self.asked += 1
        if self.asked == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")
        return await super().GetTargetInfo(request, context)


class _InTurn:
    """Tells the leases at the first look and from the fourth on; in between nobody has one."""

    can_change = False
    looks = 0

    def __init__(self, leases: Mapping[str, TargetLease | None]) -> None:
        self._leases = leases

    async def read(self) -> Mapping[str, TargetLease | None]:
        self.looks += 1
        return self._leases if self.looks == 1 or self.looks >= 4 else {}

    async def close(self) -> None:
        pass


async def test_a_gateway_does_not_begin_with_a_target_whose_lease_has_ended(world: World) -> None:
    """It would know neither the context window nor the vocabulary, and refuse every request."""
    async with Fleet(world, "a", _Shy) as fleet:
        leases = _InTurn({fleet.targets[0].fake.address: fleet.targets[0]._lease()})
        targets = TargetPool(leases, world.tokenizer_hash, grpc.aio.insecure_channel, MonotonicClock(), 16)
        await targets.start(PATIENCE_S)
        try:
            assert targets.info.vocab_size == VOCAB
            assert leases.looks == 4
        finally:
            await targets.close()
