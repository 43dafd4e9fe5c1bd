"""Measure what certain tokens gain and cost: schemas on extractions, predictions on edits, and masks.

`structured`: answers by a schema. `predicted`: edits of files, with the file as the prediction. Both compare
`auto` with `off`. `--arms` takes more: `none-16` has the session's own sources alone, such as the tokens that
the grammar forces, and `auto:plain` leaves the prediction out. `masks`: speculation off, with the schema and
without it (`off:plain`); all answers are cut while every schema still requires tokens, so that they are
equally long. All arms of the first two must return the same tokens: that no answer differs from that of `off`
is a goal. Answers that were cut before their JSON was complete are counted.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

from bench.harness import Goal, at_least
from bench.loops import speculation
from bench.loops.options import Options, workloads_of
from bench.loops.run import Run, Scenario, of_arm
from galley.bench.closed_loop import AUTO, OFF, Load, LoopBlock, LoopSide
from galley.bench.summary import speed_ratio
from galley.bench.workloads import EDITS, EXTRACT, Workload
from galley.core.names import PREDICTION

PLAIN = ":plain"
# Bounds by the number of streams.
STRUCTURED_BOUNDS = {1: 2.0, 16: 1.25}
PREDICTED_BOUNDS = {1: 3.0, 16: 1.3}
MASK_BOUND = 0.95


class Plain:
    """A side whose requests have neither schema nor prediction."""

    def __init__(self, side: LoopSide) -> None:
        self._side = side

    async def run(self, load: Load) -> LoopBlock:
        prompts = tuple(replace(prompt, schema=None, prediction=None) for prompt in load.prompts)
        block = await self._side.run(replace(load, arm=load.arm.removesuffix(PLAIN), prompts=prompts))
        return replace(block, load=load)


@asynccontextmanager
async def start(run: Run) -> AsyncIterator[Mapping[str, LoopSide]]:
    """Start one stack, whose gateway answers every arm."""
    async with speculation.start(run) as sides:
        yield {arm: Plain(side) if arm.endswith(PLAIN) else side for arm, side in sides.items()}


def whole_answers(options: Options) -> list[Workload]:
    """Return the workloads with answers of up to `max_tokens` each, not only in the mean."""
    return [
        replace(one, prompts=tuple(replace(prompt, max_tokens=options.max_tokens) for prompt in one.prompts))
        for one in workloads_of(options)
    ]


def differing(run: Run) -> dict[str, int]:
    """Count by arm the answers whose tokens differ from those of `off` to the same prompt and seed."""
    return {
        arm: sum(
            mine.tokens != plain.tokens
            for block, base in zip(of_arm(run.blocks, arm), of_arm(run.blocks, OFF), strict=True)
            for mine, plain in zip(block.answers, base.answers, strict=True)
        )
        for arm in run.options.arms
        if arm != OFF
    }


def incomplete(run: Run) -> dict[str, int]:
    """Count by arm the answers that are no JSON, because `max_tokens` cut them."""
    return {
        arm: sum(not _is_json(answer.text) for block in of_arm(run.blocks, arm) for answer in block.answers)
        for arm in run.options.arms
    }


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _speed_goals(run: Run, name: str, bounds: Mapping[int, float]) -> list[Goal]:
    """Bound AUTO against speculation off at each number of streams and temperature; no token may differ."""
    run.facts["differing_answers"] = counts = differing(run)
    total = sum(counts.values())
    same = Goal(name, "answers whose tokens differ from those of off", str(total), "0", met=not total)
    return [same, *_ratio_goals(run, name, "tokens/s of auto against off", (AUTO, OFF), bounds)]


def _ratio_goals(
    run: Run, name: str, what: str, arms: tuple[str, str], bounds: Mapping[int, float]
) -> Iterator[Goal]:
    """Bound the speed of one arm against another at each number of streams and temperature."""
    for streams, bound in bounds.items():
        for temperature in run.options.temperatures:
            mine, base = (of_arm(run.blocks, arm, streams, temperature) for arm in arms)
            ratio = speed_ratio(mine, base)
            if ratio is not None:
                of = f"{what}, {streams} streams at {temperature:g}"
                yield at_least(name, of, ratio, bound, "x")


def structured_goals(run: Run) -> list[Goal]:
    run.facts["incomplete_answers"] = incomplete(run)
    return _speed_goals(run, "structured", STRUCTURED_BOUNDS)


def from_prediction(run: Run) -> float:
    """Return the share of AUTO's tokens that came from the prediction: the model need not follow it."""
    answers = [answer for block in of_arm(run.blocks, AUTO) for answer in block.answers]
    accepted = sum(
        of.accepted
        for answer in answers
        if answer.rounds
        for of in answer.rounds.sources
        if of.source == PREDICTION
    )
    return round(accepted / max(1, sum(len(answer.tokens) for answer in answers)), 3)


def predicted_goals(run: Run) -> list[Goal]:
    run.facts["from_prediction"] = from_prediction(run)
    return _speed_goals(run, "predicted", PREDICTED_BOUNDS)


def mask_goals(run: Run) -> list[Goal]:
    """Bound the speed of constrained streams against unconstrained ones, both without drafts."""
    what = "tokens/s with a schema against without, speculation off"
    bounds = dict.fromkeys(run.options.streams, MASK_BOUND)
    return [*_ratio_goals(run, "masks", what, (OFF, OFF + PLAIN), bounds)]


def _scenario(
    name: str, about: str, defaults: Options, goals: Callable[[Run], list[Goal]], baseline: str = OFF
) -> Scenario:
    """Return a scenario whose answers are whole, and that needs all its arms."""
    arms = frozenset(defaults.arms)
    return Scenario(
        name, about, defaults, baseline, start, goals, primed_by=OFF, workloads=whole_answers, required=arms
    )


STRUCTURED = _scenario(
    "structured",
    "extractions by schemas: forced runs and the draft pool against speculation off",
    Options((OFF, AUTO), (1, 16), (0.0,), workloads=(EXTRACT,), max_tokens=192),
    structured_goals,
)
PREDICTED = _scenario(
    "predicted",
    "edits of files with the file as the prediction against speculation off",
    Options((OFF, AUTO), (1, 16), (0.0,), workloads=(EDITS,), max_tokens=160),
    predicted_goals,
)
MASKS = _scenario(
    "masks",
    "what the masks of schemas cost without drafts",
    Options((OFF, OFF + PLAIN), (1, 16), workloads=(EXTRACT,), max_tokens=24),
    mask_goals,
    baseline=OFF + PLAIN,
)
