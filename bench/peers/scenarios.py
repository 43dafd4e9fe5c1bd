"""The scenarios that compare engines, and their bounds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from bench.engine import kv_memory
from bench.harness import Goal, at_least
from bench.loops.options import Options
from bench.loops.run import Run, Scenario, of_arm, own_tag
from bench.peers.arms import ENGINE, INT8, ON_VLLM, VLLM, VLLM_NGRAM, split, start
from galley.bench.closed_loop import AUTO, OFF
from galley.bench.summary import speed_ratio


@dataclass(frozen=True, slots=True)
class Bound:
    """The least ratio of the speeds of two arms; `at` has other bounds for some numbers of streams."""

    arm: str
    base: str
    least: float
    at: tuple[tuple[int, float], ...] = ()

    def of(self, streams: int) -> float:
        return dict(self.at).get(streams, self.least)


PEER_BOUNDS = (Bound(OFF, VLLM, 1.0), Bound(ENGINE, VLLM, 1.0))
ENGINE_BOUNDS = (
    Bound(ENGINE + INT8, ENGINE, 1.25, at=((1, 1.5), (64, 1.0))),
    Bound(ENGINE + ON_VLLM, VLLM, 0.98),
    Bound(OFF + ON_VLLM, VLLM, 0.95),
    Bound(AUTO + ON_VLLM, VLLM_NGRAM, 1.0),
)


def goals(run: Run, bounds: tuple[Bound, ...]) -> list[Goal]:
    """Judge the arms of `bounds` at each number of streams and temperature."""
    found = []
    for bound in bounds:
        for streams in run.options.streams:
            for temperature in run.options.temperatures:
                mine, base = (
                    of_arm(run.blocks, arm, streams, temperature) for arm in (bound.arm, bound.base)
                )
                ratio = speed_ratio(mine, base)
                if ratio is not None:
                    what = f"tokens/s, {streams} streams at {temperature:g}, {ratio.count} pairs"
                    name = f"{bound.arm} / {bound.base}"
                    found.append(at_least(name, what, ratio, bound.of(streams), "x"))
    return found


def check(options: Options) -> str:
    """Return what is wrong with the arms, or an empty string."""
    try:
        for arm in options.arms:
            split(arm)
    except ValueError as error:
        return str(error)
    return ""


def throughput_goals(run: Run) -> list[Goal]:
    """Measure what the blocks of a KV pool take in memory."""
    run.facts["kv_memory"] = kv_memory.measure(run.model_dir, run.options.dtype)
    return [kv_memory.goal(run.facts["kv_memory"])]


THROUGHPUT = Scenario(
    "throughput",
    "closed loops of 1 to 64 streams: the whole stack, and the engine alone",
    Options((OFF, "ngram-4", ENGINE), streams=(1, 8, 16, 64), threads=2),
    OFF,
    start,
    throughput_goals,
    tag_of=own_tag,
    only_first_turns=True,
    required=frozenset({OFF}),
    check=check,
)
PEERS = Scenario(
    "peers",
    "our stack and our engine alone beside vLLM on the CPU, equal cores",
    Options((OFF, ENGINE, VLLM), streams=(1, 8, 16, 64), threads=2),
    VLLM,
    start,
    partial(goals, bounds=PEER_BOUNDS),
    tag_of=own_tag,
    only_first_turns=True,
    required=frozenset({VLLM}),
    check=check,
)
_ARMS = (ENGINE, ENGINE + INT8, VLLM, VLLM_NGRAM, ENGINE + ON_VLLM, OFF + ON_VLLM, AUTO + ON_VLLM)
ENGINES = Scenario(
    "engines",
    "our engines and vLLM, alone and behind our gateway, equal cores (at least 7 pairs count as measured)",
    Options(_ARMS, streams=(1, 8, 16, 64), threads=2, pairs=3, max_tokens=24),
    VLLM,
    start,
    partial(goals, bounds=ENGINE_BOUNDS),
    tag_of=own_tag,
    only_first_turns=True,
    required=frozenset({VLLM}),
    check=check,
)
