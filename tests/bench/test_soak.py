"""`make soak` without a stack: what it asks, how it judges, what it leaves."""

from __future__ import annotations

import io
import json
import mmap
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from bench.soak import report
from bench.soak_clients import NEVER, UNREAD, Arrival, Heard, Refusal
from bench.soak_goals import goals_of
from bench.soak_leaks import Left, errors_in, errors_of_grpc, tasks_left
from bench.soak_memory import Held, Sample, growth, held
from bench.soak_options import SoakOptions, parse_options
from bench.soak_outcome import Block, Outcome, Overload, Probe, Span, back_after_s, harm
from bench.soak_requests import Manner, Mix, References, catalogue, speculations

PAIRS = 7
BLOCK_S = 10.0
LEFT = Left(
    gone_s=1.0,
    session_keys=0,
    blocks_held=0,
    waiting=0,
    places=64,
    max_sessions=64,
    more_descriptors={"gateway": 2},
    more_threads={"gateway": 0},
    tasks={"gateway": 0},
)


# -------------------------------------------------------------------------------------- what it asks --


def test_the_mix_has_everything_and_is_the_same_for_the_same_seed() -> None:
    known = catalogue(8, seed=1)
    modes = speculations(draft_model=True)
    mix, again = Mix(known, modes, seed=2), Mix(known, modes, seed=2)
    drawn = [mix.draw() for _ in range(400)]
    assert drawn == [again.draw() for _ in range(400)]
    assert {visit.manner for visit in drawn} == set(Manner)
    assert {visit.speculation.strategy for visit in drawn} == {"", "ngram", "hybrid"}
    assert any(visit.speculation.off for visit in drawn)
    assert len({visit.request.max_tokens for visit in drawn}) > 2
    assert len({visit.request.temperature for visit in drawn}) > 2
    once = [visit.request.text for visit in drawn if not visit.request.name]
    assert 100 < len(once) == len(set(once)), "what is asked once was never asked before"
    assert all(visit.leave_after < visit.request.max_tokens for visit in drawn)


def test_an_answer_is_compared_with_what_was_learnt() -> None:
    references = References()
    request = replace(catalogue(2, seed=1)[1], max_tokens=4, ignore_eos=True)
    assert not references.agree(request, [1, 2], whole=True), "too short, whatever is right"
    references.learn(request.name, [1, 2, 3, 4])
    assert references.agree(request, [1, 2, 3, 4], whole=True)
    assert references.agree(request, [1, 2], whole=False)
    assert not references.agree(request, [1, 2], whole=True)
    assert not references.agree(request, [1, 3], whole=False)
    assert not references.agree(request, [1, 2, 3, 4, 5], whole=False)


# -------------------------------------------------------------------------------------- how it judges --


def test_growth_is_of_the_windows_medians() -> None:
    values = [100.0, 900.0, 100.0, 100.0, 100.0] + [100.0] * 15 + [104.0, 104.0, 1.0, 104.0, 104.0]
    assert growth(values).share == pytest.approx(0.04)
    with pytest.raises(ValueError, match="windows"):
        growth(values[:9])


def test_what_a_process_holds_is_seen_to_grow() -> None:
    before = held(os.getpid())
    size = 64 << 20
    # Fresh from the system: an allocator may have as much left over.
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as kept:
        kept.write(b"\1" * size)
        grown = held(os.getpid()).anonymous - before.anonymous
    assert grown >= 0.9 * size


@pytest.mark.parametrize(
    "bad",
    [
        {"refused": 1},
        {"failed": 1},
        {"wrong": 1},
        {"longest_gap_s": 11.0},
        {"longest_wait_s": 31.0},
        {"least_blocks_free": 0},
    ],
)
def test_a_load_holds_if_nothing_went_wrong(bad: dict[str, int]) -> None:
    good = Probe(60, 0, 0, 0, 1.0, 5.0, 100, 200.0)
    assert good.holds
    assert not replace(good, **bad).holds


def arrivals(span: Span, gap_s: float, *, counted: bool = True) -> list[Arrival]:
    """One stream's, a token at a time."""
    count = round(span.seconds / gap_s)
    return [Arrival(span.first_s + (at + 0.5) * gap_s, 1, gap_s, counted) for at in range(count)]


def blocks() -> list[Block]:
    def block(at: int) -> Block:
        return Block(at // 2, at % 2 == 1, Span(at * BLOCK_S, (at + 1) * BLOCK_S))

    return [block(at) for at in range(2 * PAIRS)]


def heard(slower: float = 1.0) -> Heard:
    came = [
        one
        for block in blocks()
        for one in arrivals(block.span, 0.1 * (slower if block.misread else 1.0))
        + arrivals(block.span, 5.0, counted=False)
    ]
    return Heard(came, ended={"read": 5, f"{NEVER}: {UNREAD}": 2})


def test_harm_is_what_misreaders_cost_the_others() -> None:
    pace, gaps = harm(heard(slower=1.5), blocks())
    assert pace.median == pytest.approx(1.5, rel=0.01)
    assert gaps.median == pytest.approx(1.5, rel=0.01)
    assert pace.count == PAIRS


def overload(slump_s: float = 0.0, refused_ms: float = 5.0) -> Overload:
    """Ten tokens a second, and none for so long after it."""
    before, during, after = Span(0, 60), Span(60, 120), Span(120, 220)
    came = [
        one for one in arrivals(Span(0, 220), 0.1) if not during.last_s < one.at_s < during.last_s + slump_s
    ]
    refusals = [Refusal(61 + 0.01 * at, refused_ms / 1000, 1.0) for at in range(100)]
    return Overload(before, during, after, Heard(came), Heard(refusals=refusals), [0.001])


def test_back_is_when_the_next_half_minute_is_as_before() -> None:
    assert back_after_s(overload()) == 0
    assert back_after_s(overload(slump_s=20)) == pytest.approx(19, abs=1)
    assert back_after_s(overload(slump_s=90)) is None


def sample(at_s: float, mib: float = 100.0) -> Sample:
    size = round(mib * 2**20)
    return Sample(at_s, {"target": Held(size, size, 8, 30)}, 2**20, 9, 50, 100, 1)


def outcome(**changed: object) -> Outcome:
    found = Outcome(
        streams=60,
        heard=heard(),
        soaked=Span(0, 2 * PAIRS * BLOCK_S),
        blocks=blocks(),
        samples=[sample(float(at)) for at in range(round(2 * PAIRS * BLOCK_S))],
        overload=overload(),
        left=LEFT,
    )
    for name, value in changed.items():
        setattr(found, name, value)
    return found


def missed(found: Outcome) -> list[str]:
    return [f"{goal.name}: {goal.what}" for goal in goals_of(found) if not goal.met]


def test_a_good_run_meets_its_goals() -> None:
    assert missed(outcome()) == []


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"samples": [sample(float(at), 100 + at / 10) for at in range(140)]}, "target: growth"),
        ({"heard": heard(slower=1.2)}, "others' time a token"),
        ({"heard": replace(heard(), wrong=["c1: s"])}, "wrong answers"),
        ({"heard": replace(heard(), refusals=[Refusal(1.0, 0.1, 1.0)])}, "refused calls"),
        ({"heard": replace(heard(), failures=["UNAVAILABLE: x"])}, "failed calls"),
        ({"overload": overload(slump_s=50)}, "back at 95%"),
        ({"overload": overload(refused_ms=150)}, "p99 until the client knows"),
        ({"left": replace(LEFT, session_keys=1)}, "keys of sessions"),
        ({"left": replace(LEFT, blocks_held=1)}, "blocks of the target"),
        ({"left": replace(LEFT, places=63)}, "streams admitted at once"),
        ({"left": replace(LEFT, more_descriptors={"gateway": 9})}, "more descriptors"),
        ({"left": replace(LEFT, tasks={"gateway": None})}, "tasks that outlived"),
        ({"left": replace(LEFT, tasks={"gateway": 60})}, "tasks that outlived"),
        ({"left": replace(LEFT, errors=("session failed",))}, "errors in the logs"),
    ],
)
def test_each_fault_misses_its_goal(changed: dict[str, object], expected: str) -> None:
    assert any(expected in what for what in missed(outcome(**changed)))


def test_a_run_that_did_not_end_has_no_goals() -> None:
    with pytest.raises(ValueError, match="did not come to its end"):
        goals_of(outcome(left=None))


# -------------------------------------------------------------------------------------- what it leaves --


def test_what_a_log_says_of_leaks(tmp_path: Path) -> None:
    log = tmp_path / "gateway.log"
    log.write_text(
        '{"event": "stream ended", "level": "info"}\n'
        '{"event": "session failed", "level": "error", "logger": "services.gateway.servicer"}\n'
        '{"event": "ExecuteBatchError raised", "level": "error", "logger": "grpc._cython.cygrpc"}\n'
        "Task was destroyed but it is pending!\n"
        '{"event": "stopped", "level": "info", "tasks": 3}\n'
    )
    assert tasks_left(log) == 3
    assert errors_of_grpc(log) == 1
    assert errors_in(log) == ["Task was destroyed but it is pending!", "session failed"]
    log.write_text('{"event": "stream ended", "level": "info"}\n')
    assert tasks_left(log) is None


def test_the_record_and_the_plot_are_written(tmp_path: Path) -> None:
    record, said, found = tmp_path / "soak" / "abc.json", io.StringIO(), outcome()
    report(found, goals_of(found), SoakOptions(), Console(file=said, width=150), record)
    kept = json.loads(record.read_text())
    assert kept["name"] == "soak"
    assert len(kept["goals"]) == len(goals_of(found))
    assert len(kept["samples"]) == len(found.samples)
    assert record.with_suffix(".png").stat().st_size > 1000
    lines = said.getvalue().splitlines()
    assert lines[-len(kept["goals"]) - 1] == "goal | what | measured | bound | met"


def test_options() -> None:
    options, root = parse_options(["--minutes", "6", "--streams", "8"], None)
    assert (options.minutes, options.streams) == (6, 8)
    assert root is not None
    assert parse_options(["--quick"], None)[1] is None
    for wrong in (["--minutes", "1"], ["--fold", "0"]):
        with pytest.raises(SystemExit):
            parse_options(wrong, None)
