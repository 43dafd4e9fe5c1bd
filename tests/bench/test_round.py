"""The round benchmark without models: the order of its blocks, its tables and goals, its record."""

from __future__ import annotations

import io
import json
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc.aio
import pytest
from rich.console import Console

from bench import summary
from bench.arms import PEER_LOOKUP, PLAIN, Ask, Cpu, GalleySide, speculation_of, strategies_of
from bench.harness import Answer, Block, Prompt, Rounds
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
from services.client.client import GalleyClient
from services.common.pb.galley.v1 import galley_pb2 as pb
from services.common.pb.galley.v1 import galley_pb2_grpc as rpc

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterator
    from pathlib import Path

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
    seen = [prompt.id for turn in plan if turn.temperature == 0 and turn.pair != WARM_UP for prompt in turn.prompts]
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


def rounds(accepted: int, orchestration_ms: float) -> Rounds:
    ns = int(orchestration_ms * 1e6)
    return Rounds(
        rounds=10,
        drafted=40,
        verified=40,
        accepted=accepted,
        accepted_at=(8, 4),
        verified_at=(10, 10, 10),
        orchestration_ns=(ns,) * 10,
        round_ns=10 * (ns + 40_000_000),
        draft_compute_ns=10_000_000,
        target_compute_ns=390_000_000,
    )


def block(pair: int, arm: str, token_ms: float, *, prompt_set: str = "rewrite", temperature: float = 0.0) -> Block:
    tokens = tuple(range(40))
    answered = Answer(
        prompt_id=f"{prompt_set}-{pair}",
        prompt_tokens=12,
        tokens=tokens,
        at_s=tuple(token_ms / 1e3 * (at + 1) for at in tokens),
        wall_s=0.04 * token_ms,
        cpu_s=0.05 * token_ms,
        from_draft=tuple(at % 2 == 1 for at in tokens),
        rounds=None if arm == PEER_LOOKUP else rounds(0 if arm == PLAIN else 20, 1.5 if arm == PLAIN else 2.0),
    )
    if arm == PLAIN and answered.rounds is not None:
        answered = Answer(**{**_fields(answered), "rounds": Rounds(rounds=40, orchestration_ns=(1_500_000,) * 40)})
    return Block(pair, arm, prompt_set, temperature, (answered,))


def _fields(answered: Answer) -> dict[str, object]:
    return {name: getattr(answered, name) for name in Answer.__slots__}
