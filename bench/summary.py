"""From the blocks of a round benchmark to its tables and goals. No I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from bench.harness import Block, Goal, at_least, at_most, cpu_per_token, share_cut, tokens_per_s
from galley.bench.answers import Rounds
from galley.bench.stats import Interval, median_interval, percentile, ratio_interval

ALL_SETS = "all"
ORCHESTRATION_BOUND_MS = 3.0
REWRITE_BOUND = 2.0
_NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast an arm answered one set (or all) at one temperature, and how often as fast as the baseline."""

    arm: str
    prompt_set: str
    temperature: float
    tokens_per_s: float
    ratio: Interval
    cpu_ms_per_token: float
    first_token_ms: float
    share_cut: float
    # Of the greedy answers, those whose counted tokens are the baseline's; None when sampling.
    same_answers: float | None


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How an arm's proposals fared; over whole answers, for rounds are not cut at a loop.

    `by_position[i]` is the chance that draft token i was accepted where it was verified. `draft_share` is the
    share of counted tokens that the draft had proposed.
    """

    arm: str
    prompt_set: str
    temperature: float
    rounds: int
    accepted_per_verified: float
    mean_acceptance_length: float
    draft_share: float
    by_position: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Orchestration:
    """What a round costs beside the models: round time minus draft and target compute, in milliseconds.

    The interval is of the blocks' medians; `median` and `p99` are over all rounds; the rest are means.
    """

    arm: str
    rounds: int
    of_blocks: Interval
    median_ms: float
    p99_ms: float
    round_ms: float
    draft_ms: float
    target_ms: float


def speeds(blocks: Sequence[Block], baseline: str) -> list[Speed]:
    """One row an arm, set (and all sets) and temperature, in the order in which they first come."""
    groups: dict[tuple[str, float, str], list[Block]] = defaultdict(list)
    for block in blocks:
        groups[block.prompt_set, block.temperature, block.arm].append(block)
    for block in blocks:
        groups[ALL_SETS, block.temperature, block.arm].append(block)
    return [
        _speed(arm, prompt_set, temperature, mine, groups[prompt_set, temperature, baseline])
        for (prompt_set, temperature, arm), mine in groups.items()
    ]


def _speed(arm: str, prompt_set: str, temperature: float, mine: list[Block], base: list[Block]) -> Speed:
    return Speed(
        arm=arm,
        prompt_set=prompt_set,
        temperature=temperature,
        tokens_per_s=tokens_per_s(mine),
        ratio=ratio_interval(_by_pair(mine), _by_pair(base)),
        cpu_ms_per_token=1e3 * cpu_per_token(mine),
        first_token_ms=1e3 * percentile([a.at_s[0] for b in mine for a in b.answers if a.at_s], 50),
        share_cut=share_cut(mine),
        same_answers=_same_answers(mine, base) if temperature == 0 else None,
    )


def _by_pair(blocks: Iterable[Block]) -> list[float]:
    """Tokens per second of each pair, in order."""
    pairs: dict[int, list[Block]] = defaultdict(list)
    for block in blocks:
        pairs[block.pair].append(block)
    return [tokens_per_s(pairs[pair]) for pair in sorted(pairs)]


def _same_answers(mine: list[Block], base: list[Block]) -> float:
    said = {(b.pair, a.prompt_id): a.tokens[: a.counted] for b in base for a in b.answers}
    same = [a.tokens[: a.counted] == said[b.pair, a.prompt_id] for b in mine for a in b.answers]
    return sum(same) / len(same)


def acceptances(blocks: Sequence[Block]) -> list[Acceptance]:
    """One row for each arm that proposed anything, each set (and all sets) and temperature."""
    groups: dict[tuple[str, float, str], list[Block]] = defaultdict(list)
    for prompt_set_of in (lambda block: block.prompt_set, lambda _: ALL_SETS):
        for block in blocks:
            groups[prompt_set_of(block), block.temperature, block.arm].append(block)
    rows = [
        _acceptance(arm, prompt_set, temperature, mine)
        for (prompt_set, temperature, arm), mine in groups.items()
    ]
    return [row for row in rows if row is not None]


def _acceptance(arm: str, prompt_set: str, temperature: float, blocks: Sequence[Block]) -> Acceptance | None:
    counts = _rounds_of(blocks)
    verified, accepted = sum(c.verified for c in counts), sum(c.accepted for c in counts)
    rounds = sum(c.rounds for c in counts)
    if not verified:
        return None
    accepted_at = _sum_by_position(c.accepted_at for c in counts)
    verified_at = _sum_by_position(c.verified_at for c in counts)
    counted = [drafted for b in blocks for a in b.answers for drafted in a.from_draft[: a.counted]]
    return Acceptance(
        arm=arm,
        prompt_set=prompt_set,
        temperature=temperature,
        rounds=rounds,
        accepted_per_verified=accepted / verified,
        mean_acceptance_length=1 + accepted / rounds,
        draft_share=sum(counted) / len(counted),
        by_position=tuple(a / v for a, v in zip_longest(accepted_at, verified_at, fillvalue=0) if v),
    )


def _rounds_of(blocks: Iterable[Block]) -> list[Rounds]:
    return [answer.rounds for block in blocks for answer in block.answers if answer.rounds is not None]


def _sum_by_position(counts: Iterable[tuple[int, ...]]) -> list[int]:
    return [sum(at) for at in zip_longest(*counts, fillvalue=0)]


def orchestrations(blocks: Sequence[Block]) -> list[Orchestration]:
    """One row for each arm of ours, over all sets and temperatures."""
    arms: dict[str, list[Block]] = defaultdict(list)
    for block in blocks:
        if _rounds_of([block]):
            arms[block.arm].append(block)
    return [_orchestration(arm, mine) for arm, mine in arms.items()]


def _orchestration(arm: str, blocks: Sequence[Block]) -> Orchestration:
    counts = _rounds_of(blocks)
    rounds = sum(c.rounds for c in counts)
    every = [ns / _NS_PER_MS for c in counts for ns in c.orchestration_ns]
    by_block = [
        [ns / _NS_PER_MS for c in _rounds_of([block]) for ns in c.orchestration_ns] for block in blocks
    ]
    return Orchestration(
        arm=arm,
        rounds=rounds,
        of_blocks=median_interval([percentile(values, 50) for values in by_block if values]),
        median_ms=percentile(every, 50),
        p99_ms=percentile(every, 99),
        round_ms=sum(c.round_ns for c in counts) / rounds / _NS_PER_MS,
        draft_ms=sum(c.draft_compute_ns for c in counts) / rounds / _NS_PER_MS,
        target_ms=sum(c.target_compute_ns for c in counts) / rounds / _NS_PER_MS,
    )


def goals(speed_rows: Sequence[Speed], orchestration_rows: Sequence[Orchestration]) -> list[Goal]:
    """Orchestration, by its worst arm; and the speed of prompt lookup on `rewrite`, at each temperature."""
    found: list[Goal] = []
    if orchestration_rows:
        worst = max(orchestration_rows, key=lambda row: row.of_blocks.median)
        what = f"orchestration per round, median, worst arm ({worst.arm}; p99 {worst.p99_ms:.2f} ms)"
        found.append(at_most("orchestration", what, worst.of_blocks, ORCHESTRATION_BOUND_MS, " ms"))
    ngram = [row for row in speed_rows if row.prompt_set == "rewrite" and row.arm.startswith("ngram-")]
    for temperature in sorted({row.temperature for row in ngram}):
        best = max((row for row in ngram if row.temperature == temperature), key=lambda row: row.ratio.median)
        what = f"tokens/s on rewrite at temperature {temperature:g}, best k ({best.arm}) against k=0"
        found.append(at_least("rewrite-ngram", what, best.ratio, REWRITE_BOUND, "x"))
    return found
