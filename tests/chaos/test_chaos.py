"""Processes die, hang and drain under streams, and none of them shows: the short form of `make chaos`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.chaos.model import save_model
from tests.chaos.trial import KILL, PARTS, STOP, TERM, Disturbance, Trial, disturbances, trial

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(120)
on_one_loop = pytest.mark.asyncio(loop_scope="module")

STREAMS = 8
MAX_TOKENS = 300
SEED = 7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def under(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Trial]:
    """One stack for all tests of this module, under streams from its first test to its last."""
    async with trial(model, STREAMS, MAX_TOKENS, SEED, tmp_path_factory.mktemp("logs")) as running:
        await running.learn()
        running.start()
        yield running


@on_one_loop
@pytest.mark.parametrize("part", ["target", "draft", "gateway"])
async def test_a_part_that_drains_under_load_fails_no_stream(under: Trial, part: str) -> None:
    measured = await under.disturb(Disturbance(part, TERM))
    assert measured.worst_s < 10


@on_one_loop
async def test_a_target_that_hangs_is_left_before_its_lease_ends(under: Trial) -> None:
    measured = await under.disturb(Disturbance("target", STOP, frozen_s=6.0))
    assert measured.worst_s < 5


@on_one_loop
@pytest.mark.parametrize("part", ["target", "gateway", "draft", "valkey"])
async def test_a_part_that_is_killed_costs_a_pause(under: Trial, part: str) -> None:
    await under.disturb(Disturbance(part, KILL))


@on_one_loop
async def test_every_stream_was_its_reference(under: Trial) -> None:
    """The last: whatever was done to the stack, none differed and none was lost."""
    await under.finish()
    assert all(stream.answers for stream in under.streams)


def test_the_same_seed_disturbs_the_same() -> None:
    assert disturbances(50, seed=3) == disturbances(50, seed=3)
    assert disturbances(50, seed=3) != disturbances(50, seed=4)
    kinds = {(each.part, each.what) for each in disturbances(21, seed=3)}
    assert kinds == {(part, what) for part in PARTS for what in (KILL, TERM, STOP)}
