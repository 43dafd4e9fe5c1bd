"""A bounded number of simulated schedules (`make simulate` runs many). A seed always gives one schedule."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.simulation.loop import Deadlock, SimLoop
from tests.simulation.mutants import MUTANTS, Mutant
from tests.simulation.run import part_of, play
from tests.simulation.schedule import Schedule
from tests.simulation.seeds import schedule_of
from tests.simulation.shrink import shrink
from tests.simulation.world import quiet, run_schedule

SEEDS = range(200)
CROWDS = range(15)
MOST_SEEDS = 300
"""In which every mutant has to be found; how many each takes is not for a test to say."""

COPED_WITH = (
    "client: Fenced",
    "client: StoreUnavailable",
    "client: TargetUnavailable",
    "client: Unavailable",
    "client: DeadlinePassed",
    "client: Overloaded",
    "client: Unread",
    "went on alone",
    "target failed",
    "target late",
    "breaker opened",
    "guessed by a gateway",
    "commit or claim of what is there",
    "another build",
    "drafts again",
    "roll-back",
    "store: LogBehind",
    "store: Fenced",
    "store: UnknownSession",
    "made anew by its owner",
    "kill",
    "cut",
    "freeze",
    "jump",
    "drain",
    "rival",
)


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    with quiet():
        yield


def test_no_schedule_breaks_a_rule_though_much_goes_wrong() -> None:
    part = play(SEEDS)
    assert not part.violations
    assert part.schedules == len(SEEDS)
    missing = [what for what in COPED_WITH if not part.met[what]]
    assert not missing, "these schedules prove less than they are said to"


def test_hedging_breaks_no_rule() -> None:
    part = part_of([run_schedule(schedule_of(seed, "crowd")) for seed in CROWDS])
    assert not part.violations
    assert part.met["asked of another target too"] > part.met["another target has hedged"] > 0


def first_found(mutant: Mutant) -> tuple[int, str] | None:
    for seed in range(MOST_SEEDS):
        outcome = run_schedule(schedule_of(seed, mutant.theme), mutant.kinds)
        if outcome.violation:
            return seed, outcome.violation
    return None


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_found(mutant: Mutant) -> None:
    with mutant.put_in():
        found = first_found(mutant)
    assert found is not None
    assert mutant.breaks in found[1]


_TRACES = """
from tests.simulation.seeds import schedule_of
from tests.simulation.world import quiet, run_schedule
with quiet():
    print([run_schedule(schedule_of(seed)).trace for seed in range(12)])
"""


def test_a_seed_is_one_schedule_in_any_process() -> None:
    """Whatever order hashes of strings give to sets there."""
    here = [run_schedule(schedule_of(seed)).trace for seed in range(12)]
    assert len(set(here)) == 12
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", _TRACES],
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
        )
        assert done.stdout.strip() == str(here)


def test_a_failing_schedule_is_shrunk_to_what_fails() -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == "does not fence")

    def fails(schedule: Schedule) -> bool:
        return run_schedule(schedule, mutant.kinds).violation is not None

    with mutant.put_in():
        found = first_found(mutant)
        assert found is not None
        whole = schedule_of(found[0])
        small = shrink(whole, fails)
        assert fails(small)
        assert len(small.faults) <= len(whole.faults)
        assert len(small.sessions) == 1
        for index in range(len(small.faults)):
            assert not fails(small.with_faults(small.faults[:index] + small.faults[index + 1 :]))


def test_parts_add_up() -> None:
    outcomes = [run_schedule(schedule_of(seed)) for seed in range(3)]
    part = part_of(outcomes)
    assert part.schedules == 3
    assert part.events == sum(outcome.events for outcome in outcomes)


def test_the_loop_takes_no_time() -> None:
    loop = SimLoop()
    order: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        order.append((name, loop.time()))

    async def both() -> None:
        await asyncio.gather(sleeper("late", 86_400.0), sleeper("soon", 1.0))

    loop.run_until_complete(both())
    loop.close()
    assert order == [("soon", 1.0), ("late", 86_400.0)]


def test_the_loop_says_when_nothing_can_happen_any_more() -> None:
    loop = SimLoop()

    async def waits_for_ever() -> None:
        await asyncio.Event().wait()

    task = loop.create_task(waits_for_ever())
    with pytest.raises(Deadlock):
        loop.run_until_complete(task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()
