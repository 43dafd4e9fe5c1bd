"""Running `make bench-slow-links`: the options, the plan, the relays and the gateways behind them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.arms import Cpu
from bench.closed_loop import interleaved
from bench.harness import MIN_PAIRS
from bench.link import Link
from bench.relay import Relay
from bench.throughput import encoder
from galley.bench.blocks import Cell, Sizes, pair_loads
from galley.bench.closed_loop import WARM_UP, Load, LoopBlock, LoopSide, run_all
from galley.bench.gateway import AUTO, OFF, GatewayLoop
from galley.bench.workloads import Workload
from galley.client.client import AsyncClient
from galley.common.config.defaults import DEFAULT_MODEL
from galley.core.names import ORACLE
from galley.stack.part import PartSpec
from galley.stack.parts import NO_DRAFT_MODEL, python_module
from galley.stack.stack import Stack, StackOptions

NEAR, FAR, FAR_STORE = "near", "far", "far-store"
PLACES = (NEAR, FAR, FAR_STORE)
_PARTS = ("valkey", "target", "draft")
_WARM_UP_TOKENS = 24

# Answers, by the texts of the prompts of a block.
_Truth = dict[tuple[str, ...], tuple[tuple[int, ...], ...]]


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """`prompts` and `max_tokens` of a block; `oracle_spoil` is the chance that the draft is wrong."""

    pairs: int = MIN_PAIRS
    prompts: int = 4
    max_tokens: int = 128
    delay_ms: float = 20.0
    oracle_spoil: float = 0.05
    k: int = 4
    cores: int = 2
    threads: int = 1
    dtype: str = "bfloat16"
    model: str = DEFAULT_MODEL
    seed: int = 20261121
    quick: bool = False

    @property
    def speculations(self) -> tuple[str, ...]:
        """What is measured in every place."""
        return OFF, f"{ORACLE}-{self.k}", AUTO

    @property
    def arms(self) -> tuple[str, ...]:
        """By place and speculation; the two that are compared lie side by side."""
        return tuple(arm_of(place, how) for how in self.speculations for place in PLACES)


@dataclass(slots=True)
class Outcome:
    """`differing`: answers whose tokens were not those that the target gave without speculation."""

    blocks: list[LoopBlock] = field(default_factory=list)
    differing: int = 0
    facts: dict[str, Any] = field(default_factory=dict)


def arm_of(place: str, speculation: str) -> str:
    """Its name, as `far-oracle-4`."""
    return f"{place}-{speculation}"


# -------------------------------------------------------------------------------------------- plan --


def plan(options: LinkOptions) -> tuple[list[Load], list[Load]]:
    """The blocks that teach, and the warm-ups and pairs; they ask the same prompts."""
    workload = Workload("mixed", tuple(interleaved()), "")
    sizes = Sizes(options.prompts, options.max_tokens, options.seed)

    def side_by_side(pair: int, arms: tuple[str, ...], sizes: Sizes) -> list[Load]:
        # No rotation but backwards every second time: near and far stay neighbours, and take turns to lead.
        ordered = arms if pair % 2 else arms[::-1]
        cell = Cell(workload, 1, 0.0, ordered)
        by_arm = {load.arm: load for load in pair_loads(cell, pair, sizes)}
        return [by_arm[arm] for arm in ordered]

    teaching = [side_by_side(pair, (OFF,), sizes)[0] for pair in range(WARM_UP, options.pairs)]
    short = replace(sizes, max_tokens=min(_WARM_UP_TOKENS, options.max_tokens))
    measured = side_by_side(WARM_UP, options.arms, short)
    for pair in range(options.pairs):
        measured += side_by_side(pair, options.arms, sizes)
    return teaching, measured


# --------------------------------------------------------------------------------------------- run --


async def measure(options: LinkOptions, model_dir: Path, tell: Callable[[str], None]) -> Outcome:
    """Start the stack, its relays and the gateways behind them; teach the oracle; run all blocks."""
    outcome = Outcome()
    teaching, loads = plan(options)
    async with AsyncExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="galley-bench-")))
        answers = folder / "answers.jsonl"
        answers.touch()
        tell("starting the stack")
        stack = await held.enter_async_context(Stack(_stack_options(options, model_dir, answers)))
        sides = await held.enter_async_context(_places(options, stack, model_dir))
        teacher = await held.enter_async_context(AsyncClient(stack.gateways[0]))
        tell("teaching the oracle")
        taught = [await GatewayLoop(teacher).run(load) for load in teaching]
        expected = _teach(taught, answers, encoder(model_dir))
        outcome.blocks = await run_all(loads, sides, tell)
    outcome.differing = differing(outcome.blocks, expected)
    return outcome


def _stack_options(options: LinkOptions, model_dir: Path, answers: Path) -> StackOptions:
    """With the oracle for a draft."""
    oracle = ["--oracle-answers", str(answers), "--oracle-spoil", str(options.oracle_spoil)]
    return StackOptions(
        model=str(model_dir),
        draft_model=NO_DRAFT_MODEL,
        strategies=(ORACLE,),
        dtype=options.dtype,
        threads=options.threads,
        extra_args={"draft": oracle},
    )


@asynccontextmanager
async def _places(options: LinkOptions, stack: Stack, model_dir: Path) -> AsyncIterator[dict[str, LoopSide]]:
    """A gateway for each place, with its relays, and a side for each arm."""
    delay_s = options.delay_ms / 1000
    async with AsyncExitStack() as held:

        async def behind(part: str, late_s: float) -> str:
            return (await held.enter_async_context(Relay(stack.address(part), Link(late_s)))).address

        commands = {}
        for place, late_s in ((NEAR, 0.0), (FAR, delay_s), (FAR_STORE, delay_s)):
            store = f"unix://{stack.address('valkey')}"
            if place == FAR_STORE:
                store = f"redis://{await behind('valkey', late_s)}"
            commands[place] = python_module(
                "services.gateway",
                *("--model", str(model_dir), "--redis-url", store),
                *("--target", await behind("target", late_s), "--draft", await behind("draft", late_s)),
            )
        specs = [_part(place, command) for place, command in commands.items()]
        gateways = await held.enter_async_context(
            Stack(StackOptions(threads=options.threads), parts=lambda _options, _dirs: specs)
        )
        sides: dict[str, LoopSide] = {}
        for place in PLACES:
            client = await held.enter_async_context(AsyncClient(gateways.address(place)))
            cpu = Cpu([gateways.pid(place), *(stack.pid(part) for part in _PARTS)])
            for how in options.speculations:
                sides[arm_of(place, how)] = GatewayLoop(client, cpu.seconds, how)
        yield sides


def _part(name: str, command: Sequence[str]) -> PartSpec:
    return PartSpec(name, lambda _: command)


def _teach(blocks: Sequence[LoopBlock], answers: Path, encode: Callable[[str], list[int]]) -> _Truth:
    """Tell the oracle prompts and answers; the answers by the texts of their block."""
    truth: _Truth = {}
    with answers.open("a", encoding="utf-8") as file:
        for block in blocks:
            for prompt, answer in zip(block.load.prompts, block.answers, strict=True):
                file.write(json.dumps({"tokens": [*encode(prompt.text), *answer.tokens]}) + "\n")
            truth[_texts(block)] = tuple(answer.tokens for answer in block.answers)
    return truth


def differing(blocks: Sequence[LoopBlock], truth: _Truth) -> int:
    """How many answers are not those of `truth`."""

    def wrong(block: LoopBlock) -> int:
        pairs = zip(block.answers, truth[_texts(block)], strict=True)
        return sum(answer.tokens != tokens[: block.load.max_tokens] for answer, tokens in pairs)

    return sum(map(wrong, blocks))


def _texts(block: LoopBlock) -> tuple[str, ...]:
    return tuple(prompt.text for prompt in block.load.prompts)
