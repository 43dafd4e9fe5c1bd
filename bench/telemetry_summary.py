"""From the blocks of a telemetry benchmark to its rows and goals. No I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from bench.harness import SLACK, Goal, at_least, at_most
from galley.bench.closed_loop import LoopBlock, speed_of
from galley.bench.stats import Interval, median_interval

OFF, AGAIN = "off", "off-again"
FEW, ALL, MEASURED = "sampled-1", "sampled-100", "sampled-100-metrics"
ARMS = (OFF, FEW, ALL, AGAIN, MEASURED)
PARTS = ("gateway", "target", "draft", "valkey")
MOST_LOST = 0.02
US = 1e6


@dataclass(frozen=True, slots=True)
class Cost:
    """What a block cost beside its block's own figures: CPU seconds by process, and what was exported."""

    pair: int
    arm: str
    tokens: int
    cpu_s: Mapping[str, float]
    sink_cpu_s: float
    exports: int
    exported_bytes: int

    @property
    def cpu_per_token(self) -> float:
        """Seconds, of all processes of the stack."""
        return sum(self.cpu_s.values()) / max(1, self.tokens)


@dataclass(frozen=True, slots=True)
class Row:
    """An arm beside the two stacks without telemetry (the second of these beside the first).

    `added_us` are the microseconds of CPU a token that each process takes more.
    """

    arm: str
    tokens_per_s: float
    cpu_us_per_token: float
    speed: Interval | None
    cpu: Interval | None
    added_us: dict[str, Interval]
    exported_bytes_per_token: float
    sink_us_per_token: float


def rows_of(blocks: Sequence[LoopBlock], costs: Sequence[Cost]) -> list[Row]:
    """One an arm, in the order of ARMS."""
    speeds = {(block.load.pair, block.load.arm): block.tokens_per_s for block in blocks}
    spent = {(cost.pair, cost.arm): cost for cost in costs}
    return [
        _row(
            arm,
            [block for block in blocks if block.load.arm == arm],
            [cost for cost in costs if cost.arm == arm],
            speeds,
            spent,
        )
        for arm in ARMS
    ]


def _row(
    arm: str,
    blocks: Sequence[LoopBlock],
    costs: Sequence[Cost],
    speeds: Mapping[tuple[int, str], float],
    spent: Mapping[tuple[int, str], Cost],
) -> Row:
    tokens = sum(cost.tokens for cost in costs)
    pairs = sorted(cost.pair for cost in costs)

    def cpu(pair: int, of: str) -> float:
        return spent[pair, of].cpu_per_token

    def of_part(part: str) -> Interval:
        def us(pair: int, of: str) -> float:
            cost = spent[pair, of]
            return US * cost.cpu_s[part] / max(1, cost.tokens)

        return median_interval([us(pair, arm) - base_of(arm, pair, us) for pair in pairs])

    compared = arm != OFF
    return Row(
        arm,
        speed_of(blocks),
        US * sum(sum(cost.cpu_s.values()) for cost in costs) / tokens,
        _ratio(arm, pairs, lambda pair, of: speeds[pair, of]) if compared else None,
        _ratio(arm, pairs, cpu) if compared else None,
        {part: of_part(part) for part in PARTS} if compared else {},
        sum(cost.exported_bytes for cost in costs) / tokens,
        US * sum(cost.sink_cpu_s for cost in costs) / tokens,
    )


def base_of(arm: str, pair: int, value: Callable[[int, str], float]) -> float:
    """What an arm is compared with in a pair: the mean of both stacks without; the second with the first."""
    return value(pair, OFF) if arm == AGAIN else fmean((value(pair, OFF), value(pair, AGAIN)))


def _ratio(arm: str, pairs: Sequence[int], value: Callable[[int, str], float]) -> Interval:
    return median_interval([value(pair, arm) / base_of(arm, pair, value) for pair in pairs])


def sampling_alone(blocks: Sequence[LoopBlock], costs: Sequence[Cost]) -> dict[str, Interval]:
    """All requests sampled beside one in a hundred, in the very same processes: speed and CPU a token."""
    speed: dict[str, list[float]] = defaultdict(list)
    cpu: dict[str, list[float]] = defaultdict(list)
    for block in sorted(blocks, key=lambda block: block.load.pair):
        speed[block.load.arm].append(block.tokens_per_s)
    for cost in sorted(costs, key=lambda cost: cost.pair):
        cpu[cost.arm].append(cost.cpu_per_token)
    return {
        name: median_interval([more / less for more, less in zip(of[ALL], of[FEW], strict=True)])
        for name, of in (("tokens/s", speed), ("CPU a token", cpu))
    }


def limit_of(row: Row) -> str:
    """Which process pays for telemetry, the one that pays most first."""
    ordered = sorted(row.added_us.items(), key=lambda item: -item[1].median)
    return ", ".join(f"{part} {round(added.median):+d} us" for part, added in ordered)


def differing(blocks: Sequence[LoopBlock]) -> int:
    """Answers that are not those of the same pair's block without telemetry, token by token."""
    truth = {block.load.pair: block for block in blocks if block.load.arm == OFF}
    return sum(
        mine.tokens != theirs.tokens
        for block in blocks
        for mine, theirs in zip(block.answers, truth[block.load.pair].answers, strict=True)
    )


# ------------------------------------------------------------------------------------------- goals --


def goals_of(rows: Sequence[Row], streams: int) -> list[Goal]:
    """As the benchmark's bounds are."""
    of = {row.arm: row for row in rows}
    goals = []
    for arm, how in ((ALL, "all requests sampled"), (MEASURED, "so, and metrics scraped each second")):
        goals += _within(of[arm], f"{streams} streams, {how}")
    return goals + _not_measurable(of[FEW], f"{streams} streams, one request in 100 sampled")


def _within(row: Row, what: str) -> list[Goal]:
    if row.speed is None or row.cpu is None:
        raise ValueError(f"{row.arm} was compared with nothing")
    speed = at_least("telemetry", f"tokens/s, {what}", row.speed, 1 - MOST_LOST, "x")
    cpu = at_most("telemetry", f"CPU a token, {what}", row.cpu, 1 + MOST_LOST, "x")
    return [replace(speed, measured=finely(row.speed)), replace(cpu, measured=finely(row.cpu))]


def _not_measurable(row: Row, what: str) -> list[Goal]:
    """Met if none is seen: the interval reaches 1, and is fine enough to say anything."""
    if row.speed is None or row.cpu is None:
        raise ValueError(f"{row.arm} was compared with nothing")
    speed, cpu = row.speed, row.cpu
    return [
        Goal(
            "telemetry",
            f"tokens/s, {what}",
            finely(speed),
            f"reaches 1x, none below {1 - SLACK:g}x",
            speed.high >= 1 and speed.low >= 1 - SLACK,
        ),
        Goal(
            "telemetry",
            f"CPU a token, {what}",
            finely(cpu),
            f"reaches 1x, none above {1 + SLACK:g}x",
            cpu.low <= 1 and cpu.high <= 1 + SLACK,
        ),
    ]


def finely(interval: Interval) -> str:
    """With the digits that bounds of some per cent need."""
    return f"{interval.median:.4f} [{interval.low:.4f}, {interval.high:.4f}]x"
