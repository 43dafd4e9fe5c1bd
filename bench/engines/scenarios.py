"""The scenarios that compare engines, and their bounds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from bench.engine import kv_memory
from bench.engines.arms import PAGED, VLLM, VLLM_NGRAM, start
from bench.harness import Goal, at_least
from bench.loops.options import Options
from bench.loops.run import Run, Scenario, of_arm, own_tag
from galley.bench.closed_loop import OFF
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


PEER_BOUNDS = (Bound(OFF, VLLM, 0.8), Bound(PAGED, VLLM, 1.0))
ENGINE_BOUNDS: tuple[Bound, ...] = ()


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


def throughput_goals(run: Run) -> list[Goal]:
    """Measure what the blocks of a KV pool take in memory."""
    run.facts["kv_memory"] = kv_memory.measure(run.model_dir, run.options.dtype)
    return [kv_memory.goal(run.facts["kv_memory"])]


THROUGHPUT = Scenario(
    "throughput",
    "closed loops of 1 to 64 streams: the whole stack, and the engine alone",
    Options((OFF, "ngram-4", PAGED), streams=(1, 8, 16, 64), threads=2),
    OFF,
    start,
    throughput_goals,
    tag_of=own_tag,
    required=frozenset({OFF}),
)
PEERS = Scenario(
    "peers",
    "our stack and our engine alone beside vLLM on the CPU, equal cores",
    Options((OFF, PAGED, VLLM), streams=(1, 8, 16, 64), threads=2),
    VLLM,
    start,
    partial(goals, bounds=PEER_BOUNDS),
    tag_of=own_tag,
    required=frozenset({VLLM}),
)
ENGINES = Scenario(
    "engines",
    "our engines and vLLM, alone and behind our gateway, equal cores (at least 7 pairs count as measured)",
    Options((PAGED, VLLM, VLLM_NGRAM), streams=(1, 8, 16, 64), threads=2, pairs=3, max_tokens=24),
    VLLM,
    start,
    partial(goals, bounds=ENGINE_BOUNDS),
    tag_of=own_tag,
    required=frozenset({VLLM}),
)
