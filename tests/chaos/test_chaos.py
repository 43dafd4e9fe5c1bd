"""No stream differs while processes die, hang and drain and links fail: the short form of `make chaos`."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import pytest_asyncio
from redis.asyncio import Redis

from galley.client.client import AsyncClient
from galley.client.errors import ResourceExhaustedError
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.chaos.disturbances import (
    ALL,
    CLOCK,
    CUT,
    CUT_REQUESTS,
    CUT_RESPONSES,
    CUTS,
    DELAY,
    FLIP,
    KILL,
    LONGEST_GIVE_UP_S,
    LOSS,
    PLANS,
    RESET,
    STOP,
    TERM,
    TRUNCATE,
    Disturbance,
    Plan,
    count_of,
    events,
    killed,
    pool_of,
)
from tests.chaos.goals import goals
from tests.chaos.http_streams import HttpError, HttpStream
from tests.chaos.links import GATEWAYS
from tests.chaos.run import parsed, record_name
from tests.chaos.streams import Stream, longest_wait, longest_within, options, prompts, usual_wait
from tests.chaos.trial import Measured, Trial, save_model, stack_options, trial

pytestmark = pytest.mark.timeout(300)
on_one_loop = pytest.mark.asyncio(loop_scope="module")

STREAMS = 6
MAX_TOKENS = 200
SEED = 7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def under(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Trial]:
    """Yield one stack for all tests of this module; its streams run from the first test to the last."""
    async with trial(model, STREAMS, MAX_TOKENS, SEED, tmp_path_factory.mktemp("logs")) as running:
        await running.learn()
        running.start()
        yield running


@on_one_loop
async def test_a_target_that_hangs_is_left_before_it_goes_on(under: Trial) -> None:
    measured = await under.disturb(Disturbance(("target",), STOP, 8.0))
    assert measured.worst_s < 7.5


@on_one_loop
@pytest.mark.parametrize("what", [DELAY, LOSS, RESET])
async def test_a_link_to_a_target_that_is_bad_costs_no_token(under: Trial, what: str) -> None:
    await under.disturb(Disturbance(("gateway", "target-2"), what, 0.5, 0.1))


@on_one_loop
async def test_a_gateway_leaves_a_target_that_only_it_cannot_reach(under: Trial) -> None:
    measured = await under.disturb(Disturbance(("gateway", "target"), CUT, 8.0))
    assert measured.worst_s < 7.5


@on_one_loop
async def test_a_gateway_waits_for_a_store_that_it_cannot_reach(under: Trial) -> None:
    measured = await under.disturb(Disturbance(("gateway", "valkey"), CUT, 1.5))
    assert measured.worst_s > 1.0


@on_one_loop
@pytest.mark.parametrize("what", [CUT_REQUESTS, CUT_RESPONSES])
async def test_a_one_way_cut_from_the_store_costs_no_token(under: Trial, what: str) -> None:
    """Commits arrive whose responses are lost; in the other case, neither."""
    await under.disturb(Disturbance(("gateway", "valkey"), what, 1.0))


@on_one_loop
async def test_two_cuts_at_once_that_outlast_every_give_up_cost_no_token(under: Trial) -> None:
    cuts = [Disturbance((gateway, "valkey"), CUT, 1.1 * LONGEST_GIVE_UP_S) for gateway in GATEWAYS]
    await under.disturb(*cuts)
    assert any(stream.given_up for stream in under.streams), "the cuts were too short"


@on_one_loop
@pytest.mark.parametrize("what", [TRUNCATE, FLIP])
async def test_a_damaged_file_of_the_store_makes_no_token_wrong(under: Trial, what: str) -> None:
    await under.disturb(Disturbance(("valkey",), what, amount=0.3))


@on_one_loop
@pytest.mark.parametrize("ahead_s", [-4000.0, 60.0])
async def test_a_step_of_the_stores_clock_costs_no_token(under: Trial, ahead_s: float) -> None:
    if not under.links.clock.can_step:
        pytest.skip("libfaketime is not installed")
    async with Redis.from_url(under.links.store_url("gateway")) as store, asyncio.TaskGroup() as tasks:
        tasks.create_task(under.disturb(Disturbance(("valkey",), CLOCK, 4.0, ahead_s)))
        async with asyncio.timeout(20):
            while abs((await store.time())[0] - time.time() - ahead_s) > 10:  # noqa: ASYNC110  # no event tells
                await asyncio.sleep(0.1)
    await under.disturb(killed("gateway"))  # of sessions that it has not written again nothing is left


@on_one_loop
async def test_a_client_is_heard_again_after_a_partition(under: Trial) -> None:
    measured = await under.disturb(Disturbance(("client", "gateway"), CUT, 1.5))
    assert measured.worst_s > 1.0


@on_one_loop
@pytest.mark.parametrize(("where", "what"), [(("gateway", "draft"), CUT), (("draft",), STOP)])
async def test_streams_continue_without_an_unreachable_draft(
    under: Trial, where: tuple[str, ...], what: str
) -> None:
    measured = await under.disturb(Disturbance(where, what, 4.0))
    assert measured.worst_s < 3.5


@on_one_loop
@pytest.mark.parametrize("part", ["gateway-2", "draft"])
async def test_a_part_that_drains_under_load_fails_no_stream(under: Trial, part: str) -> None:
    await under.disturb(Disturbance((part,), TERM))


@on_one_loop
@pytest.mark.parametrize("part", ["target", "gateway", "draft-2", "valkey"])
async def test_a_part_that_is_killed_costs_a_pause(under: Trial, part: str) -> None:
    await under.disturb(killed(part))


@on_one_loop
async def test_sixteen_streams_by_http_outlive_their_gateway(under: Trial) -> None:
    """Each goes on at the other gateway by Last-Event-ID; tokens and text are the undisturbed ones."""
    links = under.links
    streams = [
        HttpStream(prompt, options(MAX_TOKENS // 2, number), links.fronts, http=links.http_fronts)
        for number, prompt in enumerate(prompts(16, SEED + 1))
    ]
    await asyncio.gather(*(stream.learn() for stream in streams))
    running = [asyncio.create_task(stream.run()) for stream in streams]
    await asyncio.gather(*(stream.heard_after(0.0) for stream in streams))
    for stream in streams:
        stream.over = True
    await under.disturb(killed("gateway"))
    await asyncio.gather(*running)
    assert all(stream.resumed for stream in streams), "a stream had ended before the kill"
    assert [stream.answers for stream in streams] == [1] * 16


@on_one_loop
async def test_a_target_that_drains_gives_its_sessions_away(under: Trial) -> None:
    """Run after the test that kills the other target, which has restarted by then."""
    await under.disturb(Disturbance(("target-2",), TERM))


@on_one_loop
async def test_every_stream_was_its_reference(under: Trial) -> None:
    """Run last: after all disturbances, no stream differed and none was lost."""
    await under.finish(mended=False)
    assert all(stream.answers for stream in under.streams)


PAGED, VLLM = PLANS["paged"], PLANS["vllm"]


def test_the_same_seed_disturbs_the_same() -> None:
    assert events(500, 3, PAGED) == events(500, 3, PAGED)
    assert events(500, 3, PAGED) != events(500, 4, PAGED)


@pytest.mark.parametrize("plan", [PAGED, VLLM])
def test_a_run_reaches_its_numbers_of_kills_and_cuts(plan: Plan) -> None:
    planned = events(plan.events, 3, plan)
    targets = [one for event in planned for one in event if pool_of(one.where[0]) == "target"]
    assert count_of(planned, {KILL}) >= plan.kills
    assert sum(one.what == KILL for one in targets) >= plan.target_kills
    assert count_of(planned, CUTS) >= plan.cuts


def test_targets_that_start_slowly_are_killed_less_often_in_all_and_more_often_in_proportion() -> None:
    assert VLLM.events < PAGED.events
    assert VLLM.target_kills / VLLM.kills > PAGED.target_kills / PAGED.kills
    assert parsed([]).count == PAGED.events
    assert parsed(["--engine", "vllm"]).count == VLLM.events
    assert parsed(["--engine", "vllm", "--count", "7"]).count == 7


def test_each_engine_has_a_record_of_its_own() -> None:
    assert {engine: record_name(engine) for engine in PLANS} == {"paged": "chaos", "vllm": "chaos-vllm"}


def test_targets_run_the_engine_that_was_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tests.chaos.trial.find_vllm_python", lambda _: "/vllm/bin/python")
    with_vllm, paged = (stack_options(tmp_path, tmp_path, engine) for engine in ("vllm", "paged"))
    assert (with_vllm.engine, with_vllm.target_python) == ("vllm", "/vllm/bin/python")
    assert (paged.engine, paged.target_python) == ("paged", sys.executable)
    assert with_vllm.dtype == paged.dtype == "float32"
    assert with_vllm.replicas > 1


def test_all_is_done_to_all() -> None:
    planned = events(PAGED.events, 3, PAGED)
    assert {(one.where, one.what) for event in planned for one in event} == ALL
    assert all(len({one.where for one in event}) == len(event) for event in planned)
    for what in CUTS:
        assert any(one.is_long for event in planned for one in event if one.what == what)


@dataclass
class _SaturatedOnce:
    """A client whose first call is refused; it answers the second."""

    session_id: str = ""
    calls: int = 0
    tokens: list[int] = field(default_factory=list)
    finished: bool | None = None

    def stream(self, *_: object, **__: object) -> Any:
        self.calls += 1
        return self

    async def __aiter__(self) -> AsyncIterator[pb.StreamEvent]:
        if self.calls == 1:
            raise ResourceExhaustedError(grpc.StatusCode.RESOURCE_EXHAUSTED, "saturated", (), 0.001)
        self.tokens, self.finished = [7, 8], True
        yield pb.StreamEvent(chunk=pb.Chunk(token_ids=self.tokens))


async def test_a_call_that_a_busy_gateway_refuses_is_repeated_and_counted() -> None:
    stream = Stream([3], options(2, 0), ("gateway",), reference=[7, 8])
    await stream._answer_by(cast("AsyncClient", _SaturatedOnce()))
    assert (stream.answers, stream.refused, stream.given_up) == (1, 1, 0)


async def test_a_session_that_a_gateway_refuses_is_not_forgiven_at_once() -> None:
    stream = Stream([3], options(2, 0), ("gateway",), reference=[7, 8])
    with pytest.raises(ResourceExhaustedError):
        await stream._answer_by(cast("AsyncClient", _SaturatedOnce("s")))
    assert stream.refused == 0


@pytest.mark.parametrize(("code", "in_stream"), [("resource_exhausted", False), ("unavailable", True)])
def test_a_busy_gateway_refuses_calls_over_http_not_streams(code: str, in_stream: bool) -> None:
    error = {"code": code, "message": "saturated"}
    assert HttpError(error, refuses_call=True).is_forgiven
    assert HttpError(error).is_forgiven == in_stream


def test_waits_are_counted_from_the_strike_and_to_their_end() -> None:
    heard = [0.0, 1.0, 1.1, 4.1, 4.2, 9.2]
    assert longest_wait(heard, since=1.05, until=2.0) == pytest.approx(3.0)
    assert longest_wait(heard, since=2.0, until=3.0) == pytest.approx(2.1)
    assert longest_within(heard, 1.05, 2.05) == pytest.approx(0.95)
    assert longest_within(heard, 1.05, 6.0, asked=[4.15]) == pytest.approx(3.0)
    assert longest_within(heard, 1.05, 6.0, asked=[2.0, 5.0]) == pytest.approx(0.1)
    assert usual_wait(heard, 0.0, 4.3) == pytest.approx(0.55)
    assert usual_wait(heard, 5.0, 6.0) is None


def test_goals_are_of_every_kill_and_not_of_their_middle() -> None:
    def measured(part: str, wait_s: float, restart_s: float = 0.0) -> Measured:
        return Measured((killed(part),), (0.1, wait_s), 0.2, 0.2 + wait_s, 0.03, restart_s)

    some = [measured("target", 0.5), measured("target", 3.5), measured("gateway-2", 2.9)]
    some += [measured("valkey", 2.5, 1.6), measured("draft", 0.02)]
    met = {goal.name: goal.met for goal in goals(some, PAGED, 16, 100, "")}
    assert met == {
        "kills": False,
        "cuts": False,
        "streams": True,
        "target-killed": False,
        "gateway-killed": True,
        "store-killed": True,
        "draft-killed": True,
    }
    assert not {goal.name: goal.met for goal in goals(some, PAGED, 16, 100, "WrongToken")}["streams"]


def test_enough_kills_without_enough_of_targets_miss_the_goal() -> None:
    def met(targets: int) -> bool:
        parts = ["target"] * targets + ["gateway", "draft", "valkey"] * VLLM.kills
        some = [Measured((killed(part),), (0.1,), 0.1, 0.1, 0.03) for part in parts]
        return next(goal.met for goal in goals(some, VLLM, 16, 100, "") if goal.name == "kills")

    assert met(VLLM.target_kills)
    assert not met(VLLM.target_kills - 1)
