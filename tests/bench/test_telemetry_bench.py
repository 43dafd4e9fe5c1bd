"""`make bench-telemetry` without a stack: its plan, its sink, its figures, its goals, its record."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from rich.console import Console

from bench.arms import Cpu
from bench.otlp_sink import EXPORT, Sink, spans_in
from bench.sink_reader import SinkReader
from bench.telemetry import parse_options, report
from bench.telemetry_run import (
    PLAIN,
    STACKS,
    TRACED,
    WATCHED,
    Outcome,
    TelemetryOptions,
    TelemetrySide,
    caller_samples,
    environment_of,
    loads_of,
)
from bench.telemetry_summary import (
    AGAIN,
    ALL,
    ARMS,
    FEW,
    MEASURED,
    OFF,
    PARTS,
    Cost,
    differing,
    goals_of,
    limit_of,
    rows_of,
    sampling_alone,
)
from galley.bench.closed_loop import WARM_UP, Load, LoopBlock
from galley.bench.gateway import GatewayLoop
from tests.benching.blocks import block

OPTIONS = TelemetryOptions()
NO_COST = dict.fromkeys(ARMS, 1.0)


def blocks(slower: dict[str, float], pairs: int = 7) -> list[LoopBlock]:
    """Of a machine that slows down; each arm so many times as slow as `off`, and `off-again` by 0.2 %."""
    by_arm = {**NO_COST, AGAIN: 1.002, **slower}
    return [
        block(arm, 0.01 * (1 + 0.1 * pair) * by_arm[arm], workload="mixed", streams=16, pair=pair)
        for pair in range(pairs)
        for arm in ARMS
    ]


def costs(dearer: dict[str, dict[str, float]], pairs: int = 7) -> list[Cost]:
    """10 ms a token of each arm, and so many microseconds more by process."""

    def of(pair: int, arm: str) -> Cost:
        spent = {"gateway": 1.0, "target": 7.5, "draft": 1.0, "valkey": 0.5}
        more = dearer.get(arm, {})
        spent = {part: s * (1 + 0.1 * pair) + more.get(part, 0.0) / 1e3 for part, s in spent.items()}
        traced = arm in {ALL, MEASURED}
        return Cost(pair, arm, 1000, spent, 0.01, 5 * traced, 300_000 * traced)

    return [of(pair, arm) for pair in range(pairs) for arm in ARMS]


# ------------------------------------------------------------------------------------------ figures --


def test_arms_are_compared_with_the_mean_of_both_that_are_off() -> None:
    rows = {row.arm: row for row in rows_of(blocks({ALL: 1.01}), costs({AGAIN: {"target": 200}}))}
    assert rows[OFF].speed is None
    again, every = rows[AGAIN].speed, rows[ALL].speed
    assert again is not None
    assert every is not None
    assert again.median == pytest.approx(1 / 1.002)
    assert every.median == pytest.approx((1 / 1.01) / ((1 + 1 / 1.002) / 2))
    assert rows[AGAIN].added_us["target"].median == pytest.approx(200)
    assert rows[ALL].added_us["target"].median == pytest.approx(-100)
    assert rows[ALL].exported_bytes_per_token == 300


def test_who_pays_most_comes_first() -> None:
    rows = {
        row.arm: row for row in rows_of(blocks({}), costs({ALL: {"gateway": 90, "draft": 5, "target": 30}}))
    }
    assert limit_of(rows[ALL]) == "gateway +90 us, target +30 us, draft +5 us, valkey +0 us"


def test_sampling_is_also_compared_in_the_same_processes() -> None:
    alone = sampling_alone(blocks({ALL: 1.03, FEW: 1.02}), costs({ALL: {"gateway": 100}}))
    assert alone["tokens/s"].median == pytest.approx(1.02 / 1.03)
    # 100 us more, of 10 to 16 ms a token as the machine slows down.
    assert alone["CPU a token"].median == pytest.approx(1 + 0.1 / 13)


def test_other_tokens_than_without_telemetry_are_counted() -> None:
    given = blocks({}, pairs=1)
    assert differing(given) == 0
    short = tuple(replace(answer, tokens=answer.tokens[:-1]) for answer in given[1].answers)
    assert differing([given[0], replace(given[1], answers=short), *given[2:]]) == 16


@pytest.mark.parametrize(
    ("slower", "dearer", "met"),
    [
        ({}, {}, [True] * 6),
        ({ALL: 1.01, MEASURED: 1.015}, {ALL: {"gateway": 100}}, [True] * 6),
        ({ALL: 1.03}, {}, [False, True, True, True, True, True]),
        ({}, {ALL: {"gateway": 400}}, [True, False, True, True, True, True]),
        ({MEASURED: 1.03}, {MEASURED: {"target": 900}}, [True, True, False, False, True, True]),
        ({FEW: 1.01}, {FEW: {"gateway": 60}}, [True, True, True, True, False, False]),
    ],
)
def test_goals(slower: dict[str, float], dearer: dict[str, dict[str, float]], met: list[bool]) -> None:
    goals = goals_of(rows_of(blocks(slower), costs(dearer)), 16)
    assert [goal.met for goal in goals] == met
    assert str(goals[0]).startswith("telemetry | tokens/s, 16 streams, all requests sampled | ")
    assert "| >= 0.98x |" in str(goals[0])
    assert "| <= 1.02x |" in str(goals[1])


# --------------------------------------------------------------------------------------------- plan --


def test_all_arms_of_a_pair_are_asked_the_same_and_take_turns_to_lead() -> None:
    loads = [load for life in range(OPTIONS.lives) for load in loads_of(life, OPTIONS)]
    pairs = {load.pair for load in loads if load.pair != WARM_UP}
    assert pairs == set(range(OPTIONS.lives * OPTIONS.pairs))
    leaders = []
    for pair in pairs:
        mine = [load for load in loads if load.pair == pair]
        assert sorted(load.arm for load in mine) == sorted(ARMS)
        assert len({(tuple(prompt.text for prompt in load.prompts), load.seed) for load in mine}) == 1
        assert len(mine[0].prompts) == OPTIONS.streams * OPTIONS.turns
        leaders.append(mine[0].arm)
    assert set(leaders) == set(ARMS)
    temperatures = [load.temperature for load in loads if load.pair != WARM_UP]
    assert abs(temperatures.count(0.0) - temperatures.count(0.7)) <= len(ARMS)
    texts = [
        prompt.text for load in loads if load.arm == OFF and load.pair != WARM_UP for prompt in load.prompts
    ]
    assert len(set(texts)) == len(texts), "no pair finds another's prompts"


def test_stacks_differ_by_what_they_are_told_of_telemetry_alone() -> None:
    told = {stack: environment_of(stack, "127.0.0.1:9") for stack in STACKS}
    assert not any(value for name, value in told[PLAIN].items() if name.endswith("_ENDPOINT"))
    for stack in (TRACED, WATCHED):
        assert told[stack]["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] == "http://127.0.0.1:9"
        assert told[stack]["OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"] == ""
    assert told[TRACED]["OTEL_TRACES_SAMPLER_ARG"] == "0.01"
    assert told[WATCHED]["OTEL_TRACES_SAMPLER"] == "parentbased_always_on"


def test_a_caller_that_samples_is_followed() -> None:
    with caller_samples():
        context = trace.get_current_span().get_span_context()
    assert context.is_valid
    assert context.trace_flags.sampled
    assert not trace.get_current_span().get_span_context().is_valid


def test_too_few_pairs_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--lives", "2", "--pairs", "3"])
    assert "--pairs: at least 7 in all lives" in capsys.readouterr().err
    options, root = parse_options(["--quick"])
    assert (options.lives * options.pairs, root) == (1, None)


# --------------------------------------------------------------------------------------------- sink --


class NoCpu:
    def seconds(self) -> float:
        return 0.0


def an_export(spans: int) -> bytes:
    request = otlp.ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    for number in range(spans):
        scope.spans.add(name=f"round {number}")
    return request.SerializeToString()


@asynccontextmanager
async def a_sink() -> AsyncIterator[tuple[SinkReader, grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]]]:
    """A sink that is served, and what exports to it."""
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((Sink(),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            cpu: Cpu = NoCpu()  # type: ignore[assignment]  # all that is asked of it
            yield SinkReader(address, cpu, channel), channel.unary_unary(EXPORT)
    finally:
        server.stop(None).wait()


async def test_what_is_exported_is_counted_block_by_block_and_what_is_late_apart() -> None:
    async with a_sink() as (reader, export):
        sent = an_export(3)
        assert (
            otlp.ExportTraceServiceResponse.FromString(await export(sent))
            == otlp.ExportTraceServiceResponse()
        )
        assert await reader.of_block(ALL) == (1, len(sent))
        await export(sent)
        await reader.between_blocks()
        assert await reader.of_block(FEW) == (0, 0)
        await export(sent)
        assert await reader.of_block(OFF) == (0, 0), "nothing of it is its own"
        facts = await reader.facts()
    assert facts["exported_bytes"] == 3 * len(sent)
    assert facts["bytes_per_span"] == pytest.approx(len(sent) / 3)
    assert facts["exported_too_late_to_count"] == pytest.approx(2 / 3)
    assert spans_in([sent, sent]) == 6


class ALoop(GatewayLoop):
    """Exports while it answers, if it is to."""

    def __init__(self, export: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] | None) -> None:
        self._export = export

    async def run(self, load: Load) -> LoopBlock:
        if self._export is not None:
            await self._export(an_export(2))
        return replace(block(load.arm, 0.01), load=load)


async def test_an_arm_that_is_traced_and_exports_nothing_is_no_result() -> None:
    load = loads_of(0, OPTIONS)[0]
    cpu: dict[str, Cpu] = {}
    async with a_sink() as (reader, export):
        side = TelemetrySide(ALoop(export), cpu, reader, 0.0, [])
        assert (await side.run(replace(load, arm=ALL))).given == 40
        assert side.costs[0].exports == 1
        untraced = TelemetrySide(ALoop(None), cpu, reader, 0.0, [])
        await untraced.run(replace(load, arm=OFF))
        with pytest.raises(RuntimeError, match="exported nothing"):
            await untraced.run(replace(load, arm=MEASURED))


# ------------------------------------------------------------------------------------------- record --


def test_the_record_holds_figures_goals_and_what_else_was_seen(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    path = tmp_path / "telemetry" / "abc.json"
    outcome = Outcome(blocks({ALL: 1.01}), costs({ALL: {"gateway": 90}}), {"took_s": 1})
    report(outcome, OPTIONS, console, {"commit": "abc"}, path)
    record = json.loads(path.read_text())
    assert path.with_suffix(".png").stat().st_size > 1000
    assert [goal["met"] for goal in record["goals"]] == [True] * 6
    assert record["facts"]["differing_answers"] == 0
    assert record["facts"]["cpu_added_by_sampling_all"].startswith("gateway +90 us")
    assert set(record["rows"][2]["added_us"]) == set(PARTS)
    assert record["commit"] == "abc"
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines()[-1].endswith("| met")
