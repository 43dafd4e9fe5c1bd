"""Test the gateway benchmark's sums, goals, record and profile, and the replicas that answer at once."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from bench.gateway.__main__ import parse
from bench.gateway.load import Measured
from bench.gateway.profile import summarize
from bench.gateway.replicas import MAX_DRAFT_TOKENS, Text, VerdictQueue
from bench.gateway.report import goals, row_of, telemetry_ratio
from bench.gateway.run import (
    GATEWAYS,
    ONE,
    OVERLOAD,
    OVERLOAD_SLOTS,
    PACED,
    SATURATED,
    TELEMETRY,
    Cell,
    overload_arm,
)
from galley.pb.galley.v1 import galley_pb2 as pb


def measured(us: float = 100.0, gap_ms: tuple[float, ...] = (), hinted: int = 4) -> Measured:
    return Measured(
        seconds=2.0,
        tokens=1000,
        messages=500,
        cpu_s=us / 1e3,
        store_cpu_s=0.01,
        began=10,
        ended=6,
        waiting=0,
        first_token_ms=(10.0, 20.0, 900.0),
        gap_ms=gap_ms,
        refused=4,
        hinted=hinted,
        refusal_ms=(1.0, 2.0, 3.0),
        failed=(),
    )


def cell(part: str, us: float = 100.0, streams: int = 100, arm: str = "") -> Cell:
    return Cell(part, ONE, streams, arm, measured(us))


def test_the_cpu_of_a_token_is_bounded_at_each_number_of_streams_and_must_be_flat() -> None:
    found = goals(
        [cell(PACED, us, streams) for streams, us in ((10, 100.0), (2000, 131.0)) for _ in range(3)]
    )
    assert [(goal.name, goal.met) for goal in found] == [("cpu", True), ("cpu", False), ("flat", False)]
    assert found[2].measured == "1.31 [1.31, 1.31]x"


def test_a_row_says_how_many_streams_a_saturated_gateway_took() -> None:
    some = replace(measured(), started=312)
    assert row_of(Cell(SATURATED, ONE, 500, "", some))[2] == "312 of 500"
    assert row_of(Cell(SATURATED, ONE, 312, "", some))[2] == "312"


def test_saturation_is_judged_where_there_are_many_streams() -> None:
    found = goals([cell(SATURATED, 61.0, streams) for streams in (10, 500)])
    assert [(goal.name, goal.met) for goal in found] == [("saturated", False)]


def test_overload_is_judged_by_first_tokens_gaps_and_refusals() -> None:
    slots = OVERLOAD_SLOTS[0]
    block = measured(gap_ms=(10.0, 20.0, 31.0), hinted=3)
    found = {goal.name: goal.met for goal in goals([Cell(OVERLOAD, ONE, 0, overload_arm(slots), block)])}
    assert found == {"ttft": True, "gaps": False, "refusals": True, "hints": False}


def test_gateways_and_telemetry_are_compared_block_by_block() -> None:
    shared = [cell(GATEWAYS, us, arm=arm) for arm, us in (("1", 100.0), ("2", 105.0), ("8", 120.0))]
    assert [goal.met for goal in goals(shared)] == [True, False]
    both = [cell(TELEMETRY, us, arm=arm) for arm, us in (("plain", 100.0), ("traced", 110.0))]
    ratio = telemetry_ratio(both)
    assert ratio is not None
    assert ratio.median == pytest.approx(1.1)
    assert telemetry_ratio(both[:1]) is None


@pytest.mark.parametrize(
    "wrong", [["--parts", "all"], ["--streams", "0"], ["--blocks", "0"], ["--window-s", "-1"]]
)
def test_options_that_measure_nothing_are_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse(wrong)


def test_a_profile_sums_the_innermost_frames_by_package() -> None:
    stacks = [
        "run (asyncio/base.py:1);step (/src/galley/core/session/machine.py:20) 3",
        "run (asyncio/base.py:1);write (/env/site-packages/grpc/aio/_call.py:7) 1",
        "_bootstrap (/lib/threading.py:1);_worker (/lib/concurrent/futures/thread.py:9) 5",
    ]
    profile = summarize(stacks)
    assert profile.samples == 4
    assert profile.packages == {"galley/core/session": 0.75, "grpc": 0.25}
    assert profile.functions["galley/core/session: step"] == 0.75


def item(request_id: int, *, credit: int = 0, drafted: int = 0, hint_due: bool = False) -> pb.VerifyItem:
    return pb.VerifyItem(
        slice=pb.SessionSlice(session_id="s", request_id=request_id, tokens=range(10), max_position=100),
        credit=credit,
        draft_tokens=range(drafted),
        max_verified=drafted,
        hint_due=hint_due,
    )


def queue(*items: pb.VerifyItem, batch: int = 64) -> VerdictQueue:
    found = VerdictQueue(Text(list(range(50))), batch)
    found.receive(pb.VerifyStreamRequest(items=items))
    return found


def step(of: VerdictQueue) -> list[pb.VerifyAnswer]:
    return asyncio.run(of.step())


def test_a_verdict_has_the_drafted_tokens_and_one_more() -> None:
    [answer] = step(queue(item(1, drafted=5)))
    result = answer.result
    assert (result.position, list(result.tokens)) == (10, [10, 11, 12, 13, 14, 15])
    assert (result.accepted, result.verified, result.more) == (5, 5, False)


def test_credit_gives_verdicts_up_to_its_limit_and_an_extension_gives_more() -> None:
    of = queue(item(1, credit=1))
    assert [answer.result.more for answer in step(of)] == [True]
    of.receive(pb.VerifyStreamRequest(extensions=[pb.Extension(request_id=1, limit=13)]))
    assert [answer.result.more for _ in range(2) for answer in step(of)] == [True, False]


def test_a_step_answers_a_batch_and_no_cancelled_request() -> None:
    of = queue(*(item(number) for number in range(1, 5)), batch=2)
    of.receive(pb.VerifyStreamRequest(cancelled=[pb.ItemRef(request_id=3)]))
    assert [[answer.request_id for answer in step(of)] for _ in range(2)] == [[1, 2], [4]]


def test_a_request_waits_for_the_hint_that_is_due() -> None:
    of = queue(item(1, credit=32, hint_due=True), item(2))
    assert [answer.request_id for answer in step(of)] == [2]
    hint = pb.Hint(position=10, draft_tokens=range(3))
    of.receive(pb.VerifyStreamRequest(extensions=[pb.Extension(request_id=1, hint=hint)]))
    assert [answer.result.accepted for answer in step(of)] == [3]


def test_the_text_repeats_within_a_verdict() -> None:
    text = Text([7, 8, 9])
    assert text.tokens(5, 4) == [9, 7, 8, 9]
    assert len(text.tokens(2, MAX_DRAFT_TOKENS + 1)) == MAX_DRAFT_TOKENS + 1
