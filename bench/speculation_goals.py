"""The goals of `make bench-speculation`, from its blocks. No I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from bench.arms import PEER_ASSISTED, PEERS
from bench.closed_form import Agreement
from bench.harness import Goal, at_least, at_most
from galley.bench.closed_loop import LoopBlock
from galley.bench.gateway import AUTO, OFF
from galley.bench.stats import Interval, median_interval, ratio_interval
from galley.bench.summary import Speculated, mean_ratio, speculated, speed_ratio

ALONE_BOUND, REWRITE_BOUND = 1.6, 3.0
NEVER_A_LOSS_BOUND, BEST_FIXED_BOUND = 0.97, 0.95
EXPOSED_BOUND_PERCENT = 15.0
PEER_BOUND = 1.0

# Workload, streams and temperature.
_Cell = tuple[str, int, float]


def goals(blocks: Sequence[LoopBlock], agreement: Agreement | None, scouted: int = 0) -> list[Goal]:
    """Every goal that the blocks can tell of, in the order of the issue.

    The fixed arms that were paired are the best of `scouted`; 0 if all were paired.
    """
    cells = _cells(blocks)
    fixed = "auto against the best fixed" + (f" (off, best of {scouted} scouted)" if scouted else "")
    return [
        *_alone(blocks),
        *_rewrite(cells),
        *_in_every_cell("never-a-loss", "auto against off", NEVER_A_LOSS_BOUND, cells, _against_off),
        *_in_every_cell("best-fixed", fixed, BEST_FIXED_BOUND, cells, _against_fixed),
        *_exposed(blocks),
        *([_closed_form(agreement)] if agreement is not None else []),
        *_peer(cells),
    ]


def _cells(blocks: Sequence[LoopBlock]) -> dict[_Cell, list[LoopBlock]]:
    found: dict[_Cell, list[LoopBlock]] = defaultdict(list)
    for block in blocks:
        found[block.load.workload, block.load.streams, block.load.temperature].append(block)
    return found


def _alone(blocks: Sequence[LoopBlock]) -> list[Goal]:
    workloads = sorted({block.load.workload for block in blocks if block.load.streams == 1})
    what = f"tokens/s of auto against off, mean of {', '.join(workloads)}, 1 stream"
    found = []
    for temperature in sorted({block.load.temperature for block in blocks}):
        ratio = mean_ratio(blocks, AUTO, OFF, 1, temperature)
        if ratio is not None:
            found.append(at_least("alone", f"{what} at {temperature:g}", ratio, ALONE_BOUND, "x"))
    return found


def _rewrite(cells: dict[_Cell, list[LoopBlock]]) -> list[Goal]:
    found = []
    for (workload, streams, temperature), here in sorted(cells.items()):
        ratio = _against_off(here) if (workload, streams) == ("rewrite", 1) else None
        if ratio is not None:
            what = f"tokens/s of auto against off on rewrite, 1 stream at {temperature:g}"
            found.append(at_least("rewrite", what, ratio, REWRITE_BOUND, "x"))
    return found


def _in_every_cell(
    name: str,
    what: str,
    bound: float,
    cells: dict[_Cell, list[LoopBlock]],
    ratio_of: Callable[[Sequence[LoopBlock]], Interval | None],
) -> list[Goal]:
    """One goal a number of streams: met if every cell meets it; the one shown is the worst."""
    found = []
    for streams in sorted({streams for _, streams, _ in cells}):
        ratios = {cell: ratio_of(here) for cell, here in cells.items() if cell[1] == streams}
        known = {cell: ratio for cell, ratio in ratios.items() if ratio is not None}
        if not known:
            continue
        each = {cell: at_least(name, what, ratio, bound, "x") for cell, ratio in known.items()}
        # One that is missed is worse than one that is met.
        worst = min(each, key=lambda cell: (each[cell].met, known[cell].median))
        missed = sum(not goal.met for goal in each.values())
        title = (
            f"{what}, {streams} streams, every workload and temperature: worst {worst[0]} at {worst[2]:g}, "
            f"{missed} of {len(each)} missed"
        )
        found.append(at_least(name, title, known[worst], bound, "x"))
    return found


def _of(blocks: Sequence[LoopBlock], arm: str) -> list[LoopBlock]:
    return [block for block in blocks if block.load.arm == arm]


def _against_off(blocks: Sequence[LoopBlock]) -> Interval | None:
    return speed_ratio(_of(blocks, AUTO), _of(blocks, OFF))


def _against_fixed(blocks: Sequence[LoopBlock]) -> Interval | None:
    """Against the fixed choice, k = 0 among them, that auto comes off worst by: one missed before any met."""
    fixed = {block.load.arm for block in blocks} - {AUTO, *PEERS}
    ratios = [speed_ratio(_of(blocks, AUTO), _of(blocks, arm)) for arm in sorted(fixed)]
    known = [ratio for ratio in ratios if ratio is not None]
    return min(known, key=_by_bound) if known else None


def _by_bound(ratio: Interval) -> tuple[bool, float]:
    return at_least("", "", ratio, BEST_FIXED_BOUND).met, ratio.median


def _exposed(blocks: Sequence[LoopBlock]) -> list[Goal]:
    """Of auto: over all its rounds, and over those of one stream alone."""
    found = []
    for name, mine in (
        ("all loads", _of(blocks, AUTO)),
        ("1 stream", [block for block in _of(blocks, AUTO) if block.load.streams == 1]),
    ):
        by_pair: dict[int, list[LoopBlock]] = defaultdict(list)
        for block in mine:
            by_pair[block.load.pair].append(block)
        if by_pair:
            found.append(_exposed_in([speculated(of) for of in by_pair.values()], name))
    return found


def _exposed_in(pairs: Sequence[Speculated], where: str) -> Goal:
    """Missed where a pair counted no round: nothing shows then that no draft was waited for."""
    what = (
        "exposed draft wait of auto (with credit: the target's lingering), share of the rounds' time, "
        f"{where}"
    )
    if empty := sum(not of.round_ns for of in pairs):
        said = f"no rounds in {empty} of {len(pairs)} pairs"
        return Goal("exposed", what, said, f"<= {EXPOSED_BOUND_PERCENT:g} %", met=False)
    shares = median_interval([100 * of.exposed_share for of in pairs])
    return at_most("exposed", what, shares, EXPOSED_BOUND_PERCENT, " %")


def _closed_form(agreement: Agreement) -> Goal:
    what = (
        f"acceptance of the model draft at temperature 1, {agreement.positions} positions (optimal coupling: "
        f"{agreement.optimal:.4f}, {agreement.optimal - agreement.closed:.4f} above the closed form)"
    )
    bound = f"{agreement.closed:.4f} [{agreement.low:.4f}, {agreement.high:.4f}]"
    return Goal("closed-form", what, f"{agreement.measured:.4f}", bound, agreement.agrees)


def _peer(cells: dict[_Cell, list[LoopBlock]]) -> list[Goal]:
    found = []
    for (workload, streams, temperature), here in sorted(cells.items()):
        mine, theirs = (_decoding(_of(here, arm)) for arm in (AUTO, PEER_ASSISTED))
        pairs = sorted(mine.keys() & theirs.keys())
        if pairs:
            what = (
                "tokens/s after the first of auto against assisted generation on "
                f"{workload}, {streams} stream at {temperature:g}"
            )
            ratio = ratio_interval([mine[pair] for pair in pairs], [theirs[pair] for pair in pairs])
            found.append(at_least("assisted", what, ratio, PEER_BOUND, "x"))
    return found


def _decoding(blocks: Sequence[LoopBlock]) -> dict[int, float]:
    """By pair, counted tokens per second after those that came first: the peer's prompts are not cached."""
    found = {}
    for block in blocks:
        answers = [answer for answer in block.answers if answer.counted]
        tokens = sum(at > answer.at_s[0] for answer in answers for at in answer.at_s[: answer.counted])
        seconds = sum(answer.counted_s - answer.at_s[0] for answer in answers)
        if tokens:
            found[block.load.pair] = tokens / seconds
    return found
