"""Check for leaks after a schedule: no request, block, slot, count or task may be left."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.simulation.loop import SimTask

if TYPE_CHECKING:
    from tests.simulation.gateway import SimGateway
    from tests.simulation.world import World


def replicas_rest(world: World) -> bool:
    """No item is left, nor a block of one, when the pass that it took part in is over."""
    targets = [target.service for target in world.targets.values()]
    return not (
        any(service._scheduler.queue_depth or service._table.live_blocks for service in targets)
        or any(draft.service._loop.queue_depth for draft in world.drafts.values())
    )


async def check_leaks(world: World) -> None:
    for target in world.targets.values():
        target.service._table.check()
    for gateway in world.gateways:
        _check_counts(world, gateway)
        await _check_tasks(world, gateway)


def _check_counts(world: World, gateway: SimGateway) -> None:
    ledger = world.ledger
    if gateway.streams.left:
        ledger.violate(f"{gateway.address} has {gateway.streams.left} that nobody uses")
    for target in gateway.targets._replicas.values():
        if target.open_requests or target._rows:
            counted = f"{target.open_requests} items and {target._rows} rows at {target.address}"
            ledger.violate(f"{gateway.address} counts {counted}, and nothing is there")
    for pool in (gateway.targets, gateway.drafts):
        ledger.met.update({f"{pool.role} {why}": count for why, count in pool.move_counts.items()})


async def _check_tasks(world: World, gateway: SimGateway) -> None:
    gateway.process.spawn(gateway.close())
    await asyncio.sleep(0.5)
    left = [_name(task) for task in gateway.process.tasks.values()]
    if left:
        world.ledger.violate(f"{gateway.address} leaves tasks behind: {left}")


def _name(task: SimTask) -> str:
    return getattr(task.get_coro(), "__qualname__", "a task")
