"""The round benchmark without models: the order of its blocks, its tables and goals, its record."""

from __future__ import annotations

import dataclasses
import io
import json
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from rich.console import Console

from bench import summary
from bench.arms import PEER_LOOKUP, Cpu, strategies_of
from bench.harness import Block
from bench.round import (
    WARM_UP,
    RoundOptions,
    Surroundings,
    Turn,
    main,
    parse_options,
    report,
    run_turn,
    turns,
)
from galley.bench.answers import Answer, Prompt, Rounds
from galley.bench.gateway import PLAIN, Ask, GatewaySide, speculation_of
from galley.client.client import AsyncClient
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc

PROMPTS = {name: [Prompt(f"{name}-{n}", f"{name} {n}?") for n in range(5)] for name in ("chat", "rewrite")}
SMALL = RoundOptions(arms=("plain", "ngram-4", "ngram-8"), sets=("chat", "rewrite"), pairs=7, prompts=2)


# ------------------------------------------------------------------------------------------- order --


def test_every_arm_of_a_pair_answers_the_same_prompts_side_by_side() -> None:
    plan = [turn for turn in turns(SMALL, PROMPTS) if turn.pair != WARM_UP]
    for at in range(0, len(plan), 3):
        group = plan[at : at + 3]
        assert {turn.arm for turn in group} == set(SMALL.arms)
        assert len({(turn.pair, turn.prompt_set, turn.temperature, turn.prompts) for turn in group}) == 1


def test_no_arm_always_goes_first() -> None:
    plan = [turn for turn in turns(SMALL, PROMPTS) if turn.pair != WARM_UP]
    firsts = Counter(turn.arm for turn in plan[::3])
    assert set(firsts) == set(SMALL.arms)


def test_all_prompts_are_used_before_any_is_used_again() -> None:
    plan = [turn for turn in turns(SMALL, PROMPTS) if turn.arm == PLAIN and turn.prompt_set == "chat"]
    seen = [
        prompt.id
        for turn in plan
        if turn.temperature == 0 and turn.pair != WARM_UP
        for prompt in turn.prompts
    ]
    assert seen[:5] == [prompt.id for prompt in PROMPTS["chat"]]
    assert len(seen) == 14


def test_each_arm_warms_up_first() -> None:
    plan = list(turns(SMALL, PROMPTS))
    assert [turn.arm for turn in plan if turn.pair == WARM_UP] == list(SMALL.arms)
    assert [turn.pair for turn in plan[:3]] == [WARM_UP] * 3


class EchoSide:
    """Answers with the seed."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Ask]] = []

    async def answer(self, arm: str, ask: Ask) -> Answer:
        self.asked.append((arm, ask))
        return Answer(ask.prompt.id, 1, (ask.seed,), (0.1,), 0.1, 0.1)


async def test_all_arms_of_a_pair_get_the_same_seeds_and_pairs_differ() -> None:
    side = EchoSide()
    two = tuple(PROMPTS["chat"][:2])
    for pair, arm in ((0, "plain"), (0, "ngram-4"), (1, "plain")):
        await run_turn(Turn(pair, arm, "chat", 0.7, two), side, SMALL)
    seeds = [ask.seed for _, ask in side.asked]
    assert seeds[:2] == seeds[2:4]
    assert len(set(seeds)) == 4


# ------------------------------------------------------------------------------------------- tables --


PLAIN_ROUNDS = Rounds(
    rounds=40,
    orchestration_ns=(1_500_000,) * 40,
    round_ns=40 * 41_500_000,
    target_compute_ns=40 * 40_000_000,
)
NGRAM_ROUNDS = Rounds(
    rounds=20,
    drafted=60,
    verified=50,
    accepted=20,
    accepted_at=(15, 5),
    verified_at=(20, 20, 10),
    orchestration_ns=(2_000_000,) * 19 + (9_000_000,),
    round_ns=20 * 43_000_000,
    draft_compute_ns=20 * 1_000_000,
    target_compute_ns=20 * 40_000_000,
)


def block(
    pair: int, arm: str, token_ms: float, prompt_set: str = "rewrite", temperature: float = 0.0
) -> Block:
    tokens = tuple(range(40))
    kind = None if arm == PEER_LOOKUP else PLAIN_ROUNDS if arm == PLAIN else NGRAM_ROUNDS
    answered = Answer(
        prompt_id=f"{prompt_set}-{pair}",
        prompt_tokens=12,
        tokens=tokens,
        at_s=tuple(token_ms / 1e3 * (at + 1) for at in tokens),
        wall_s=token_ms / 1e3 * len(tokens),
        cpu_s=1.25 * token_ms / 1e3 * len(tokens),
        from_draft=tuple(arm != PLAIN and at % 2 == 1 for at in tokens),
        rounds=kind,
    )
    return Block(pair, arm, prompt_set, temperature, (answered,))


def run_of(ngram_token_ms: float) -> list[Block]:
    """Seven pairs on a machine that slows down, in which plain decoding starts at 40 ms a token."""
    return [
        block(pair, arm, token_ms * (1 + pair / 10), prompt_set, temperature)
        for pair in range(7)
        for prompt_set in ("chat", "rewrite")
        for temperature in (0.0, 0.7)
        for arm, token_ms in (
            (PLAIN, 40.0),
            ("ngram-4", 30.0),
            ("ngram-8", ngram_token_ms),
            (PEER_LOOKUP, 50.0),
        )
    ]


def test_speeds_are_ratios_of_pairs_and_not_of_a_slowing_machine() -> None:
    rows = {(row.prompt_set, row.temperature, row.arm): row for row in summary.speeds(run_of(16.0), PLAIN)}
    assert len(rows) == 3 * 2 * 4
    fast = rows["rewrite", 0.0, "ngram-8"]
    assert (fast.ratio.median, fast.ratio.low, fast.ratio.high) == pytest.approx((2.5, 2.5, 2.5))
    assert rows["all", 0.7, PEER_LOOKUP].ratio.median == pytest.approx(0.8)
    plain = rows["chat", 0.0, PLAIN]
    assert plain.ratio.median == 1
    assert plain.cpu_ms_per_token == pytest.approx(1.25 * 1e3 / plain.tokens_per_s)
    assert plain.same_answers == 1
    assert rows["chat", 0.7, PLAIN].same_answers is None


def test_other_greedy_tokens_than_plain_s_are_told() -> None:
    blocks = run_of(16.0)
    first = next(found for found in blocks if found.arm == "ngram-4")
    changed = dataclasses.replace(first.answers[0], tokens=tuple(range(1, 41)))
    blocks[blocks.index(first)] = dataclasses.replace(first, answers=(changed,))
    rows = {(row.prompt_set, row.arm): row for row in summary.speeds(blocks, PLAIN) if not row.temperature}
    assert rows["chat", "ngram-4"].same_answers == pytest.approx(6 / 7)


def test_acceptance_is_over_verified_tokens_by_position_too() -> None:
    rows = summary.acceptances(run_of(16.0))
    assert {row.arm for row in rows} == {"ngram-4", "ngram-8"}
    row = next(row for row in rows if (row.arm, row.prompt_set) == ("ngram-4", "chat"))
    assert row.rounds == 7 * 20
    assert row.accepted_per_verified == pytest.approx(20 / 50)
    assert row.mean_acceptance_length == pytest.approx(1 + 20 / 20)
    assert row.by_position == pytest.approx((0.75, 0.25, 0.0))
    assert row.draft_share == pytest.approx(0.5)


def test_orchestration_has_median_and_tail() -> None:
    rows = {row.arm: row for row in summary.orchestrations(run_of(16.0))}
    assert set(rows) == {PLAIN, "ngram-4", "ngram-8"}
    assert rows["ngram-4"].median_ms == pytest.approx(2.0)
    assert rows["ngram-4"].p99_ms == pytest.approx(9.0)
    assert (rows["ngram-4"].round_ms, rows["ngram-4"].draft_ms, rows["ngram-4"].target_ms) == (43, 1, 40)
    assert rows[PLAIN].median_ms == pytest.approx(1.5)


@pytest.mark.parametrize(("token_ms", "met"), [(16.0, True), (25.0, False)])
def test_goals_name_the_best_k_and_are_judged_at_each_temperature(*, token_ms: float, met: bool) -> None:
    blocks = run_of(token_ms)
    found = summary.goals(summary.speeds(blocks, PLAIN), summary.orchestrations(blocks))
    assert [goal.name for goal in found] == ["orchestration", "rewrite-ngram", "rewrite-ngram"]
    assert found[0].met
    assert "p99 9.00 ms" in found[0].what
    assert all("ngram-8" in goal.what and goal.met is met for goal in found[1:])


def test_the_report_prints_and_records_everything(tmp_path: Path) -> None:
    shown = io.StringIO()
    options = dataclasses.replace(SMALL, arms=("plain", "ngram-4", "ngram-8", PEER_LOOKUP))
    where = Surroundings("0123456789ab", {"cpu": "abacus"})
    report(options, run_of(16.0), Console(file=shown, width=200), where, tmp_path)
    lines = shown.getvalue().splitlines()
    assert lines[-4] == "goal | what | measured | bound | met"
    assert all(line.endswith("| met") for line in lines[-3:])
    record = json.loads((tmp_path / "round" / "0123456789ab.json").read_text())
    assert record["machine"] == {"cpu": "abacus"}
    assert record["options"]["seed"] == SMALL.seed
    assert set(record["prompt_sha256"]) == {"chat", "rewrite"}
    assert len(record["blocks"]) == 7 * 2 * 2 * 4
    assert len(record["goals"]) == 3
    assert (tmp_path / "round" / "0123456789ab.png").read_bytes().startswith(b"\x89PNG")


def test_a_quick_run_judges_nothing_and_leaves_nothing() -> None:
    options, root = parse_options(["--quick"])
    assert (options.pairs, options.max_tokens, root) == (1, 16, None)
    assert report(options, run_of(16.0), Console(file=io.StringIO()), Surroundings("x", {}), root) == []


# ----------------------------------------------------------------------------------------- options --


def test_arms_are_read_by_name() -> None:
    assert speculation_of("plain").off
    assert (speculation_of("ngram-8").strategy, speculation_of("ngram-8").k) == ("ngram", 8)
    assert strategies_of(("plain", "ngram-4", "ngram-8", "model-4", "transformers")) == ("ngram", "model")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--arms=ngram-4"], "compared with plain"),
        (["--arms=plain,fast"], "no arm 'fast'"),
        (["--arms=plain,-4"], "no arm '-4'"),
        (["--sets=poems"], "no set poems"),
        (["--pairs=6"], "at least 7"),
        (["--prompts=0"], "at least 1"),
    ],
)
def test_options_out_of_bounds_are_refused(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert problem in capsys.readouterr().err


# -------------------------------------------------------------------------------------------- wire --


class OneAnswer(rpc.GenerationServicer):
    """Streams three tokens in two chunks, and keeps the request."""

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.request = request
        for event in (
            pb.StreamEvent(started=pb.Started(session_id="s", prompt_tokens=31)),
            pb.StreamEvent(chunk=pb.Chunk(index=0, token_ids=[5, 6], from_draft=[True, False])),
            pb.StreamEvent(chunk=pb.Chunk(index=2, token_ids=[7], from_draft=[False])),
            pb.StreamEvent(
                finished=pb.Finished(
                    speculation=pb.SpeculationStats(
                        rounds=2, verified=4, accepted=1, accepted_at=[1], orchestration_ns=[10, 20]
                    )
                )
            ),
        ):
            yield pb.GenerateResponse(event=event)

    def Resume(self, request: object, context: object) -> AsyncIterator[pb.ResumeResponse]:
        raise NotImplementedError

    async def Abort(self, request: object, context: object) -> pb.AbortResponse:
        raise NotImplementedError

    async def GetModelInfo(self, request: object, context: object) -> pb.GetModelInfoResponse:
        raise NotImplementedError


@asynccontextmanager
async def served(servicer: OneAnswer) -> AsyncIterator[str]:
    server = grpc.aio.server()
    rpc.add_GenerationServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_an_answer_of_ours_is_what_the_stream_said() -> None:
    servicer = OneAnswer()
    ask = Ask(Prompt("chat-0", "Hello?"), temperature=0.7, seed=11, max_tokens=8)
    async with served(servicer) as address, AsyncClient(address) as client:
        got = await GatewaySide(client, Cpu([os.getpid()]).seconds).answer("ngram-4", ask)
    assert (got.tokens, got.from_draft, got.prompt_tokens) == ((5, 6, 7), (True, False, False), 31)
    assert len(got.at_s) == 3
    assert got.at_s[0] == got.at_s[1] <= got.at_s[2] <= got.wall_s
    assert got.cpu_s >= 0
    assert got.rounds == Rounds(rounds=2, verified=4, accepted=1, accepted_at=(1,), orchestration_ns=(10, 20))
    assert servicer.request.messages.messages[0].content == "Hello?"
    assert servicer.request.speculation == pb.Speculation(
        mode=pb.Speculation.MODE_FIXED, k=4, strategy="ngram"
    )
    assert (servicer.request.sampling.seed, servicer.request.max_tokens) == (11, 8)
