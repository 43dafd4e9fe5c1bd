"""Full collections come when memory has grown or much time has passed, and not by counts of objects."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator, Sequence

import pytest

from galley.common.server.garbage import collect_seldom
from tests.fakes.waiting import PATIENCE_S

MIB = 1 << 20
UNKNOWN = -1


@pytest.fixture(autouse=True)
def own_collections() -> Iterator[None]:
    thresholds, callbacks = gc.get_threshold(), list(gc.callbacks)
    yield
    gc.set_threshold(*thresholds)
    gc.callbacks[:] = callbacks
    gc.unfreeze()


@pytest.mark.parametrize(
    ("sizes_mib", "collections"),
    [
        ([100, 355, 355], 0),
        ([100, 356, 356], 1),
        ([100, 40, 295, 295], 0),
        ([100, 40, 296, 296], 1),
        ([100, 356, 300, 555, 555], 1),
        ([100, 356, 300, 556, 556], 2),
        ([100, UNKNOWN, 355, UNKNOWN, 356, 356], 1),
        ([UNKNOWN, 500, 500], 0),
        ([100] * 599, 0),
        ([100] * 600, 1),
        ([UNKNOWN] * 600, 1),
    ],
    ids=[
        "little growth",
        "growth",
        "little growth after a release",
        "growth after a release",
        "little growth after a collection",
        "growth after a collection",
        "growth that is not always seen",
        "a size that is seen late",
        "little time",
        "time",
        "time without sizes",
    ],
)
async def test_full_collections(sizes_mib: Sequence[int], collections: int) -> None:
    left, collected = list(sizes_mib), 0

    def resident() -> int:
        size_mib = left.pop(0)
        if not left:
            task.cancel()
        if size_mib == UNKNOWN:
            raise OSError("too many open files")
        return size_mib * MIB

    def count(phase: str, info: dict[str, int]) -> None:
        nonlocal collected
        collected += phase == "stop" and info["generation"] == 2

    task = collect_seldom(resident, look_s=0.0)
    gc.callbacks.append(count)
    await asyncio.wait([task], timeout=PATIENCE_S)
    assert not left
    assert collected == collections
    assert gc.get_threshold()[2] > 10**9
