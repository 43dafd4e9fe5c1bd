"""Running `make bench-speculation`: scouting the fixed arms, the pairs, the closed form."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bench.arms import PEER_ASSISTED, Cpu, TransformersSide
from bench.closed_form import Agreement, agreement
from bench.heldout import answers_at_one, guesses, scored
from bench.loop_run import SERVERS
from bench.peer_draft import load_assistant
from bench.speculation_estimate import estimate_s
from bench.speculation_options import CLOSED_FORM, LOOPS, SpeculationOptions
from bench.throughput import encoder
from galley.bench.answers import Answer, Prompt
from galley.bench.blocks import Cell, Sizes, pair_loads, priming
from galley.bench.closed_loop import WARM_UP, Load, LoopBlock, LoopSide, in_streams, run_all
from galley.bench.gateway import AUTO, OFF, Ask, GatewayLoop, GatewaySide
from galley.bench.workloads import fixed_workload
from galley.client.client import AsyncClient
from galley.core.names import MODEL
from galley.stack.parts import draft_model_of
from galley.stack.stack import Stack, StackOptions

SCOUT = -2
_PROMPTS = 3
_SCOUT_PROMPTS = 2
_SCOUT_TOKENS = 16
_WARM_UP_TOKENS = 8

# Workload, streams and temperature.
_Cell = tuple[str, int, float]


@dataclass(slots=True)
class Outcome:
    """What a run came to. `best` are the fixed arms that were paired, by cell."""

    blocks: list[LoopBlock] = field(default_factory=list)
    best: dict[_Cell, tuple[str, ...]] = field(default_factory=dict)
    scouted: list[LoopBlock] = field(default_factory=list)
    agreement: Agreement | None = None
    left_out: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


class PeerLoop:
    """transformers' assisted generation, one answer at a time."""

    def __init__(self, side: TransformersSide) -> None:
        self._side = side

    async def run(self, load: Load) -> LoopBlock:
        """Generate every answer of the load. ValueError for more streams than one."""
        if load.streams != 1:
            raise ValueError("assisted generation answers one prompt at a time")

        async def answer(prompt: Prompt, seed: int) -> Answer:
            return await self._side.answer(load.arm, Ask(prompt, load.temperature, seed, load.max_tokens))

        cpu_before, began_s = time.process_time(), time.perf_counter()
        came = await in_streams(load, answer)
        wall_s = time.perf_counter() - began_s
        return LoopBlock(load, came.answers, wall_s, time.process_time() - cpu_before)


# -------------------------------------------------------------------------------------------- plan --


class Planner:
    """Which blocks come next."""

    def __init__(self, options: SpeculationOptions, fixed: tuple[str, ...], peer: tuple[str, ...]) -> None:
        self._options = options
        self._workloads = [fixed_workload(name) for name in options.sets]
        self._fixed = fixed
        self._peer = peer

    def warm_up(self) -> list[Load]:
        """A short block of every arm."""
        workload, sizes = self._workloads[0], Sizes(1, _WARM_UP_TOKENS, self._options.seed)
        cell = Cell(workload, 1, 0.0, (OFF, AUTO, *self._fixed, *self._peer))
        return _side_by_side(cell, WARM_UP, sizes)

    def scouts(self) -> list[Load]:
        """A block of each fixed arm in each cell, where not all of them are paired."""
        found = []
        for cell in self._cells():
            if 0 < self.paired(cell.streams) < len(self._fixed):
                whole = self._sizes(cell.streams)
                tokens = min(whole.max_tokens, max(_SCOUT_TOKENS, whole.max_tokens // 2))
                sizes = replace(whole, prompts=_SCOUT_PROMPTS, max_tokens=tokens, turns=1)
                found += _side_by_side(cell, SCOUT, sizes)
        return found

    def paired(self, streams: int) -> int:
        """How many fixed arms go into a pair."""
        return self._options.fixed_alone if streams == 1 else self._options.fixed

    def choose(self, scouted: Sequence[LoopBlock]) -> dict[_Cell, tuple[str, ...]]:
        """The fixed arms of each cell: all, or the fastest scouted; those first named where none was."""
        ranked = sorted(scouted, key=lambda block: block.tokens_per_s, reverse=True)
        best = {}
        for cell in self._cells():
            key, count = _cell_key(cell), self.paired(cell.streams)
            here = [block.load.arm for block in ranked if _key(block.load) == key]
            best[key] = tuple(dict.fromkeys((*here, *self._fixed)))[:count]
        return best

    def pairs(self, best: dict[_Cell, tuple[str, ...]]) -> list[Load]:
        """Pair by pair every cell; the peer is asked at one stream."""
        found = []
        for pair in range(self._options.pairs):
            for cell in self._cells():
                peer = self._peer if cell.streams == 1 else ()
                arms = (OFF, AUTO, *best[_cell_key(cell)], *peer)
                found += _side_by_side(replace(cell, arms=arms), pair, self._sizes(cell.streams))
        return found

    def _cells(self) -> list[Cell]:
        """Of every fixed arm."""
        return [
            Cell(workload, streams, temperature, self._fixed, index)
            for streams in self._options.streams
            for index, workload in enumerate(self._workloads)
            for temperature in self._options.temperatures
        ]

    def _sizes(self, streams: int) -> Sizes:
        options = self._options
        return Sizes(_PROMPTS, options.max_tokens if streams == 1 else options.busy_max_tokens, options.seed)


def _cell_key(cell: Cell) -> _Cell:
    return cell.workload.name, cell.streams, cell.temperature


def _key(load: Load) -> _Cell:
    return load.workload, load.streams, load.temperature


def _side_by_side(cell: Cell, pair: int, sizes: Sizes) -> list[Load]:
    """The blocks of a pair, after one that has the target keep their prompts."""
    return [priming(cell, pair, sizes), *pair_loads(cell, pair, sizes)]


# --------------------------------------------------------------------------------------------- run --


async def measure(options: SpeculationOptions, model_dir: Path, tell: Callable[[str], None]) -> Outcome:
    """Start the stack and the peer, run all that `options` name, stop."""
    outcome = Outcome()
    stack_options = StackOptions(
        model=options.model, draft_model=options.draft_model, dtype=options.dtype, threads=options.threads
    )
    peer = _peer(options, stack_options, model_dir, outcome)
    async with AsyncExitStack() as held:
        tell("starting the stack")
        stack = await held.enter_async_context(Stack(stack_options))
        client = await held.enter_async_context(AsyncClient(stack.gateways[0]))
        cpu = Cpu([stack.pid(part) for part in stack.parts if part in SERVERS])
        offered = (await client.model_info()).strategies
        if LOOPS in options.parts:
            await _loops(options, GatewayLoop(client, cpu.seconds), offered, peer, outcome, tell)
        if CLOSED_FORM in options.parts and peer is not None and MODEL in offered:
            asked = GatewaySide(client), stack.address("draft")
            outcome.agreement = await _closed_form(options, asked, model_dir, peer, tell)
    return outcome


async def _loops(  # what a run has
    options: SpeculationOptions,
    ours: LoopSide,
    offered: Sequence[str],
    peer: TransformersSide | None,
    outcome: Outcome,
    tell: Callable[[str], None],
) -> None:
    fixed = _fixed_arms(options, offered, outcome)
    peers = (PEER_ASSISTED,) if peer is not None and options.peer and 1 in options.streams else ()
    sides: dict[str, LoopSide] = dict.fromkeys((OFF, AUTO, *fixed), ours)
    if peer is not None and peers:
        sides[PEER_ASSISTED] = PeerLoop(peer)
        outcome.facts["peer_threads"] = await _faster_threads(peer, options)
    planner = Planner(options, fixed, peers)
    planned = [*planner.warm_up(), *planner.scouts(), *planner.pairs(planner.choose([]))]
    outcome.facts["estimated_s"] = round(estimate_s(planned, options))
    minutes = outcome.facts["estimated_s"] / 60
    tell(f"{len(planned)} blocks, estimated {minutes:.0f} min at plain decoding's pace")
    tell("scouting the fixed arms")
    outcome.scouted = await run_all([*planner.warm_up(), *planner.scouts()], sides, tell)
    outcome.best = planner.choose(outcome.scouted)
    tell("pairs")
    outcome.blocks = await run_all(planner.pairs(outcome.best), sides, tell)


async def _faster_threads(peer: TransformersSide, options: SpeculationOptions) -> int:
    """Have the peer use one thread or --peer-threads, whichever is faster here; how many they are.

    Two threads of its OpenMP wait for one another by spinning: beside anything busy they are far slower.
    """
    prompt = fixed_workload(options.sets[0]).prompts[0]
    took_s = {}
    for threads in dict.fromkeys((1, options.peer_threads)):
        peer.threads = threads
        answers = [
            await peer.answer(PEER_ASSISTED, Ask(prompt, 0.0, options.seed, _WARM_UP_TOKENS))
            for _ in range(3)
        ]
        took_s[threads] = min(answer.wall_s for answer in answers)
    peer.threads = min(took_s, key=lambda threads: took_s[threads])
    return peer.threads


def _fixed_arms(options: SpeculationOptions, offered: Sequence[str], outcome: Outcome) -> tuple[str, ...]:
    missing = [name for name in options.strategies if name not in offered]
    if missing:
        outcome.left_out.append(f"strategies that the draft does not offer: {', '.join(missing)}")
    named = [name for name in options.strategies if name in offered]
    arms = tuple(f"{name}-{k}" for name in named for k in options.k)
    for streams in options.streams:
        paired = options.fixed_alone if streams == 1 else options.fixed
        if paired < len(arms):
            outcome.left_out.append(
                f"at {streams} streams the pairs hold the best {paired} of {len(arms)} fixed arms, by one "
                "block each at each temperature"
            )
    return arms


def _peer(
    options: SpeculationOptions, stack: StackOptions, model_dir: Path, outcome: Outcome
) -> TransformersSide | None:
    """transformers with our draft; also what scores answers for the closed form. None without a draft."""
    draft = draft_model_of(stack)
    if draft is None:
        outcome.left_out.append("assisted generation and the closed form: there is no draft model")
        return None
    from galley.engine.load.resolve import resolve_model  # noqa: PLC0415  # transformers takes seconds

    dtype = getattr(torch, options.dtype)
    assistant = load_assistant(resolve_model(draft), model_dir, dtype)
    return TransformersSide(model_dir, options.dtype, options.peer_threads, assistant)


async def _closed_form(
    options: SpeculationOptions,
    asked: tuple[GatewaySide, str],
    model_dir: Path,
    peer: TransformersSide,
    tell: Callable[[str], None],
) -> Agreement:
    """The fixed prompts, the sets in turn: no draft was trained on them, and none may be."""
    sets = [fixed_workload(name).prompts for name in options.sets]
    every = [prompt for group in zip(*sets, strict=True) for prompt in group]
    prompts = every[: options.heldout_prompts]
    side, draft = asked
    tell(f"{len(prompts)} answers at temperature 1")
    answers = await answers_at_one(side, prompts, options.heldout_tokens, options.seed)
    tell("the draft's guesses")
    ids = [encoder(model_dir)(prompt.text) for prompt in prompts]
    guessed = await guesses(draft, answers, ids, options.seed)
    return agreement(await scored(answers, ids, guessed, peer.models, tell))
