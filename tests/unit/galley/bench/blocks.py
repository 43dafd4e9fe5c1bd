"""Blocks made up for tests of what is made of blocks."""

from __future__ import annotations

from galley.bench.answers import Answer, Rounds
from galley.bench.closed_loop import Load, LoopBlock
from galley.bench.workloads import Prompt


def block(
    arm: str,
    token_s: float,
    *,
    workload: str = "chat",
    streams: int = 1,
    pair: int = 0,
    temperature: float = 0.0,
    rounds: Rounds | None = None,
) -> LoopBlock:
    tokens = tuple(range(40))
    at_s = tuple(token_s * (at + 1) for at in tokens)
    load = Load(
        pair,
        arm,
        streams,
        temperature,
        (Prompt("p", "?"),) * streams,
        max_tokens=40,
        seed=1,
        workload=workload,
    )
    answer = Answer(tokens, at_s, at_s[-1], rounds)
    return LoopBlock(load, (answer,) * streams, at_s[-1], cpu_s=0.4 * streams)


def rounds_of(verified: int, accepted: int, *, target_ms: float = 30.0, draft_ms: float = 0.0) -> Rounds:
    return Rounds(
        rounds=10,
        proposed=2 * verified,
        drafted=verified,
        verified=verified,
        accepted=accepted,
        accepted_at=(accepted,),
        verified_at=(verified,),
        round_ns=400_000_000,
        exposed_draft_ns=40_000_000,
        draft_compute_ns=round(10e6 * draft_ms),
        target_compute_ns=round(10e6 * target_ms),
    )
