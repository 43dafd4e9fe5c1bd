"""Full collections come when a process has grown."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from itertools import chain, repeat

import pytest

from galley.common.server.garbage import collect_as_it_grows
from tests.fakes.waiting import PATIENCE_S

MIB = 1 << 20


class Knot:
    """A cycle, which only a collection frees."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def own_collections() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


@pytest.mark.parametrize(
    ("sizes_mib", "collects"),
    [((100, 355), False), ((100, 356), True), ((100, 40, 295), False), ((100, 40, 296), True)],
    ids=["little growth", "growth", "little growth after a release", "growth after a release"],
)
async def test_growth_collects_what_has_lived_long(sizes_mib: tuple[int, ...], collects: bool) -> None:
    looks = chain(sizes_mib, repeat(sizes_mib[-1]))
    seen, looked = 0, asyncio.Event()
    knots: list[weakref.ref[Knot]] = []

    def resident() -> int:
        nonlocal seen
        if not knots:
            knot = Knot()
            gc.collect(1)  # it outlives the collections of the young
            knots.append(weakref.ref(knot))
        seen += 1
        if seen > len(sizes_mib) + 2:
            looked.set()
        return next(looks) * MIB

    task = asyncio.create_task(collect_as_it_grows(resident, look_s=0.0))
    async with asyncio.timeout(PATIENCE_S):
        await looked.wait()
    task.cancel()
    assert (knots[0]() is None) is collects
