"""The processes of `make bench-gateway`, with a tokenizer of bytes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from bench.gateway.__main__ import record
from bench.gateway.load import Load, Measured
from bench.gateway.parts import Cluster
from bench.gateway.run import ONE, PACED, SATURATED, SIX, TELEMETRY, Bench, Cell, Options, measure
from tests.fakes import tokenizer_files

MEASURED = Measured(
    seconds=2.0,
    tokens=1000,
    messages=500,
    cpu_s=0.1,
    store_cpu_s=0.01,
    began=0,
    ended=0,
    waiting=0,
    first_token_ms=(),
    gap_ms=(1.0, 2.0, 3.0),
    refused=0,
    hinted=0,
    refusal_ms=(),
    failed=(),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer_files.write(directory)
    return directory


def test_every_verdict_is_taken_and_costs_time(model: Path) -> None:
    options = Options(
        parts=(PACED, TELEMETRY),
        streams=(3,),
        rate=200.0,
        drafted_rate=100.0,
        blocks=1,
        pairs=1,
        window_s=1.5,  # a busy machine may hold a stream up for half a second
        profile=False,  # py-spy needs the right to trace processes
    )
    bench = Bench(options, model, lambda _: None)
    asyncio.run(bench.run())
    found = {(cell.part, cell.verdict, cell.arm): cell.measured for cell in bench.cells}
    assert all(not one.failed and one.tokens and one.cpu_s for one in found.values()), found
    assert found[PACED, SIX, ""].tokens_per_message > 1
    assert {arm for part, _, arm in found if part == TELEMETRY} == {"plain", "traced"}


def test_answers_beyond_the_slots_are_refused_with_a_time_to_retry(model: Path) -> None:
    async def overload() -> None:
        async with Cluster(model, rate=50.0, max_sessions=1).stack() as stack:
            load = Load(
                (stack.address("gateway"),),
                (stack.pid("gateway"),),
                arrivals_per_s=20.0,
                answer_tokens=64,
                window_s=1.0,
            )
            measured = await measure(load)
        assert not measured.failed
        assert measured.refused == measured.hinted > 0
        assert len(measured.refusal_ms) == 3

    asyncio.run(overload())


def test_a_part_measured_later_keeps_the_others(tmp_path: Path) -> None:
    path = tmp_path / "gateway.json"
    for part in (PACED, SATURATED):
        bench = Bench(Options(parts=(part,)), tmp_path, lambda _: None)
        bench.cells = [Cell(part, ONE, 100, "", MEASURED)]
        record(path, bench)
    parts = json.loads(path.read_text())["parts"]
    assert list(parts) == [PACED, SATURATED]
    assert parts[PACED]["cells"][0]["us_per_token"] == [100.0]
