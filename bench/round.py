"""`make bench-round`: what a round costs and what speculation gains, on the default model in bfloat16.

Arms: plain (our k = 0, speculation off), ngram at k = 4 and 8, a model draft at k = 4 (two of the target's
own layers, untrained: it costs what a draft costs and is hardly ever right), and transformers' `generate`,
plain and with prompt lookup. Gateway, draft, target and Valkey are real processes, one OpenMP thread each;
the peer may use every core that they have together (--peer-threads). One stream at a time.

The budget. A pair is every prompt set at every temperature, answered by every arm in turn, so that the
blocks that are compared lie seconds apart; the order of the arms rotates from pair to pair. Each pair takes
the next `--prompts` prompts of each set. An answer of 96 tokens takes about 4 s at 25 tokens/s, so that all
six arms, 7 pairs, 4 sets and 2 temperatures take about 40 minutes on two cores, and 15 with `--max-tokens
48`, which cuts most answers on `rewrite` in the middle of the copy. `--prompts 3 --pairs 8` sees all 24
prompts of each set and takes three times that; fewer sets or arms (`--sets rewrite --arms
plain,ngram-4,ngram-8 --prompts 3 --pairs 8`) make a sharper answer to one question.
`--quick` only shows that everything runs: its figures mean nothing, and its goals are not judged.

What counts is in bench/harness.py. Speed is counted tokens over the time from the request to the last of
them, time to first token included. CPU seconds are those of all our server processes, or of the peer's one.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import plots, summary
from bench.arms import (
    PEER_LOOKUP,
    PEER_LOOKUP_TOKENS,
    PEER_PLAIN,
    PEERS,
    Cpu,
    Side,
    TransformersSide,
    strategies_of,
)
from bench.harness import MIN_PAIRS, Block, Goal, commit, machine, result_path, share_cut, write_record
from galley.bench.answers import Prompt
from galley.bench.gateway import PLAIN, Ask, GatewaySide, speculation_of
from galley.bench.workloads import PROMPT_SETS, load_prompts, prompt_hash
from galley.client.client import AsyncClient
from galley.stack.stack import Stack, StackOptions

ARMS = (PLAIN, "ngram-4", "ngram-8", "model-4", PEER_PLAIN, PEER_LOOKUP)
TEMPERATURES = (0.0, 0.7)
WARM_UP = -1
_FILE_WIDTH = 150
_SERVERS = ("valkey", "target", "draft", "gateway")


@dataclass(frozen=True, slots=True)
class RoundOptions:
    """What to run; `prompts` is a set's prompts per pair."""

    arms: tuple[str, ...] = ARMS
    sets: tuple[str, ...] = PROMPT_SETS
    temperatures: tuple[float, ...] = TEMPERATURES
    pairs: int = MIN_PAIRS
    prompts: int = 1
    max_tokens: int = 96
    dtype: str = "bfloat16"
    model: str = ""
    draft_layers: str = "0,1"
    threads: int = 1
    peer_threads: int = 1
    seed: int = 20261121
    quick: bool = False


# ------------------------------------------------------------------------------------------- order --


@dataclass(frozen=True, slots=True)
class Turn:
    """One block to run."""

    pair: int
    arm: str
    prompt_set: str
    temperature: float
    prompts: tuple[Prompt, ...]


def turns(options: RoundOptions, prompts: dict[str, list[Prompt]]) -> Iterator[Turn]:
    """The blocks in the order in which they run: a warm-up of each arm, then the pairs.

    Within a pair, set and temperature the arms follow one another; their order rotates with the pair. The
    prompts of a set are taken in turn, and again from the first once all were used.
    """
    first = options.sets[0]
    for arm in options.arms:
        yield Turn(WARM_UP, arm, first, 0.0, (prompts[first][-1],))
    for pair in range(options.pairs):
        shift = pair % len(options.arms)
        arms = options.arms[shift:] + options.arms[:shift]
        for prompt_set in options.sets:
            given = prompts[prompt_set]
            picked = range(pair * options.prompts, (pair + 1) * options.prompts)
            chosen = tuple(given[at % len(given)] for at in picked)
            for temperature in options.temperatures:
                for arm in arms:
                    yield Turn(pair, arm, prompt_set, temperature, chosen)


async def run_turn(turn: Turn, side: Side, options: RoundOptions) -> Block:
    """Ask every prompt of the turn; all arms of a pair get the same seeds."""
    answers = []
    # No draft learns from another arm's answers, nor from its own to the same prompt.
    label = f"{turn.prompt_set}/{turn.temperature:g}/{turn.arm}/{turn.pair}"
    for at, asked in enumerate(turn.prompts):
        prompt = dataclasses.replace(asked, label=label)
        seed = options.seed + (turn.pair + 1) * 1000 + at
        answers.append(await side.answer(turn.arm, Ask(prompt, turn.temperature, seed, options.max_tokens)))
    return Block(turn.pair, turn.arm, turn.prompt_set, turn.temperature, tuple(answers))


# --------------------------------------------------------------------------------------------- run --


async def measure(options: RoundOptions, console: Console) -> list[Block]:
    """Start the stack and the peer, run all blocks, stop; the warm-up is not among the blocks."""
    prompts = {name: load_prompts(name) for name in options.sets}
    async with AsyncExitStack() as held:
        sides = await _start(options, held, console)
        plan = list(turns(options, prompts))
        blocks = []
        for at, turn in enumerate(plan, 1):
            block = await run_turn(turn, sides[turn.arm], options)
            name = "warm-up" if turn.pair == WARM_UP else f"pair {turn.pair + 1}/{options.pairs}"
            speed = block.tokens / block.seconds
            console.print(
                f"[dim]{at}/{len(plan)}[/] {name}: {turn.prompt_set} at {turn.temperature:g}, {turn.arm}: "
                f"{block.tokens} tokens, {speed:.1f}/s"
            )
            if turn.pair != WARM_UP:
                blocks.append(block)
        return blocks


async def _start(options: RoundOptions, held: AsyncExitStack, console: Console) -> dict[str, Side]:
    ours = tuple(arm for arm in options.arms if arm not in PEERS)
    console.print("preparing the model")
    model_dir = prepare_model(options.model)
    strategies = strategies_of(ours)
    draft_model = None
    if "model" in strategies:
        scratch = held.enter_context(tempfile.TemporaryDirectory(prefix="galley-bench-"))
        draft_model = truncate_model(model_dir, Path(scratch) / "draft", options.draft_layers)
    console.print("starting the stack")
    stack = await held.enter_async_context(
        Stack(
            StackOptions(
                model=str(model_dir),
                draft_model=None if draft_model is None else str(draft_model),
                strategies=strategies or ("ngram",),
                dtype=options.dtype,
                threads=options.threads,
            )
        )
    )
    client = await held.enter_async_context(AsyncClient(stack.gateways[0]))
    side = GatewaySide(client, Cpu([stack.pid(part) for part in stack.parts if part in _SERVERS]).seconds)
    sides: dict[str, Side] = dict.fromkeys(ours, side)
    if any(arm in PEERS for arm in options.arms):
        peer = TransformersSide(model_dir, options.dtype, options.peer_threads)
        sides |= {arm: peer for arm in options.arms if arm in PEERS}
    return sides


def prepare_model(model: str) -> Path:
    """Find, fetch or convert the model as the stack does; the directory that it is in."""
    return _say_directory("galley.engine.load.resolve", *([model] if model else []))


def truncate_model(model_dir: Path, out: Path, layers: str) -> Path:
    """Some of the target's layers ("0,1") as a draft model of their own, untrained."""
    return _say_directory(
        "galley.engine.load.truncate", str(model_dir), "--layers", layers, "--out", str(out)
    )


def _say_directory(module: str, *arguments: str) -> Path:
    done = subprocess.run(
        (sys.executable, "-P", "-m", module, *arguments), check=True, stdout=subprocess.PIPE, text=True
    )
    return Path(done.stdout.strip().splitlines()[-1])


# ------------------------------------------------------------------------------------------ report --


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What was measured and where, as it stood before the run."""

    commit: str
    machine: dict[str, Any]


def report(
    options: RoundOptions,
    blocks: Sequence[Block],
    console: Console,
    where: Surroundings,
    root: Path | None,
) -> list[Goal]:
    """Print the tables and the goals; with `root`, leave the JSON and the plot there."""
    speed_rows = summary.speeds(blocks, PLAIN)
    acceptance_rows = summary.acceptances(blocks)
    orchestration_rows = summary.orchestrations(blocks)
    reached = [] if options.quick else summary.goals(speed_rows, orchestration_rows)
    for table in (
        _speed_table(speed_rows),
        _acceptance_table(acceptance_rows),
        _orchestration_table(orchestration_rows),
    ):
        console.print(table)
    for name in options.sets:
        cut = share_cut([block for block in blocks if block.prompt_set == name])
        said = f"{name}: sha256 {prompt_hash(name)}, {cut:.1%} of the tokens cut as loops"
        console.print(said, highlight=False, soft_wrap=True)
    if root is not None:
        path = result_path("round", where.commit, root)
        record = _record(options, blocks, where) | {
            "speeds": [dataclasses.asdict(row) for row in speed_rows],
            "acceptance": [dataclasses.asdict(row) for row in acceptance_rows],
            "orchestration": [dataclasses.asdict(row) for row in orchestration_rows],
            "goals": [dataclasses.asdict(goal) for goal in reached],
        }
        write_record(path, record)
        plots.draw(path.with_suffix(".png"), speed_rows, acceptance_rows, _orchestration_ms(blocks))
        console.print(f"record: {path}")
    console.print("goal | what | measured | bound | met", markup=False, highlight=False, soft_wrap=True)
    for goal in reached:
        console.print(str(goal), markup=False, highlight=False, soft_wrap=True)
    return reached


def _speed_table(rows: Sequence[summary.Speed]) -> Table:
    columns = (
        "set",
        "temp.",
        "arm",
        "tokens/s",
        "against k=0",
        "CPU ms/token",
        "first ms",
        "cut",
        "same as k=0",
    )
    table = Table(*columns, title="Speed (median of pairs' ratios, 95 % interval)")
    for row in rows:
        table.add_row(
            row.prompt_set,
            f"{row.temperature:g}",
            row.arm,
            f"{row.tokens_per_s:.1f}",
            str(row.ratio).replace("[", r"\["),
            f"{row.cpu_ms_per_token:.1f}",
            f"{row.first_token_ms:.0f}",
            f"{row.share_cut:.0%}",
            "" if row.same_answers is None else f"{row.same_answers:.0%}",
        )
    return table


def _acceptance_table(rows: Sequence[summary.Acceptance]) -> Table:
    columns = ("set", "temp.", "arm", "rounds", "accepted", "mean length", "from draft", "by position")
    table = Table(*columns, title="Acceptance (over verified draft tokens, whole answers)")
    for row in rows:
        table.add_row(
            row.prompt_set,
            f"{row.temperature:g}",
            row.arm,
            str(row.rounds),
            f"{row.accepted_per_verified:.0%}",
            f"{row.mean_acceptance_length:.2f}",
            f"{row.draft_share:.0%}",
            " ".join(f"{share:.2f}" for share in row.by_position),
        )
    return table


def _orchestration_table(rows: Sequence[summary.Orchestration]) -> Table:
    columns = ("arm", "rounds", "median", "p99", "round (mean)", "draft compute", "target compute")
    table = Table(*columns, title="Orchestration per round, ms (round minus draft and target compute)")
    for row in rows:
        times = (row.median_ms, row.p99_ms, row.round_ms, row.draft_ms, row.target_ms)
        table.add_row(row.arm, str(row.rounds), *(f"{ms:.2f}" for ms in times))
    return table


def _record(options: RoundOptions, blocks: Sequence[Block], where: Surroundings) -> dict[str, Any]:
    return {
        "name": "round",
        "commit": where.commit,
        "options": dataclasses.asdict(options),
        "machine": where.machine,
        "prompt_sha256": {name: prompt_hash(name) for name in options.sets},
        "differences": {
            "our processes": f"{', '.join(_SERVERS)}; {options.threads} OpenMP thread(s) each",
            "peer": f"one process, {options.peer_threads} thread(s); prompt lookup of {PEER_LOOKUP_TOKENS} "
            "tokens; same weights and dtype",
        },
        "blocks": [_block_record(block) for block in blocks],
    }


def _block_record(block: Block) -> dict[str, Any]:
    return {
        "pair": block.pair,
        "arm": block.arm,
        "set": block.prompt_set,
        "temperature": block.temperature,
        "tokens": block.tokens,
        "seconds": round(block.seconds, 4),
        "cpu_s": round(block.cpu_s, 4),
        "answers": [
            {
                "prompt": answer.prompt_id,
                "prompt_tokens": answer.prompt_tokens,
                "tokens": len(answer.tokens),
                "counted": answer.counted,
                "first_token_s": round(answer.at_s[0], 4) if answer.at_s else None,
            }
            for answer in block.answers
        ],
    }


def _orchestration_ms(blocks: Sequence[Block]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for block in blocks:
        for answer in block.answers:
            if answer.rounds is not None:
                found.setdefault(block.arm, []).extend(ns / 1e6 for ns in answer.rounds.orchestration_ns)
    return found


# -------------------------------------------------------------------------------------------- main --


def parse_options(argv: Sequence[str]) -> tuple[RoundOptions, Path | None]:
    """Read the command line; exits 2 with a message if a value is wrong. The path is None for no record."""
    default = RoundOptions(peer_threads=len(os.sched_getaffinity(0)))
    parser = argparse.ArgumentParser(
        prog="python -m bench.round",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--arms", type=_names, default=default.arms, help="comma separated; plain is needed")
    parser.add_argument("--sets", type=_names, default=default.sets, help="prompt sets")
    parser.add_argument("--temperatures", type=_numbers, default=default.temperatures)
    parser.add_argument("--pairs", type=int, default=default.pairs, help=f"at least {MIN_PAIRS}")
    parser.add_argument("--prompts", type=int, default=default.prompts, help="of each set, a pair")
    parser.add_argument("--max-tokens", type=int, default=default.max_tokens)
    parser.add_argument("--dtype", default=default.dtype)
    parser.add_argument("--model", default=default.model, help="default: the stack's own")
    parser.add_argument(
        "--draft-layers", default=default.draft_layers, help="of the target, for the model draft"
    )
    parser.add_argument("--threads", type=int, default=default.threads, help="OpenMP threads a service")
    parser.add_argument("--peer-threads", type=int, default=default.peer_threads)
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--quick", action="store_true", help="one short pair, no record, no goals")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    given = vars(parser.parse_args(argv))
    root = given.pop("results")
    options = RoundOptions(**given)
    if options.quick:
        options = dataclasses.replace(options, pairs=1, max_tokens=min(16, options.max_tokens))
        root = None
    problem = _problem(options)
    if problem:
        parser.error(problem)
    return options, root


def _problem(options: RoundOptions) -> str:
    if PLAIN not in options.arms:
        return "--arms: everything is compared with plain"
    if unknown := set(options.sets) - set(PROMPT_SETS):
        return f"--sets: no set {', '.join(sorted(unknown))}; there are {', '.join(PROMPT_SETS)}"
    if options.pairs < MIN_PAIRS and not options.quick:
        return f"--pairs: at least {MIN_PAIRS}"
    if min(options.prompts, options.max_tokens, options.threads, options.peer_threads) < 1:
        return "--prompts, --max-tokens, --threads and --peer-threads: at least 1"
    try:
        for arm in options.arms:
            if arm not in PEERS:
                speculation_of(arm)
    except ValueError as error:
        return f"--arms: {error}"
    return ""


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 0 however the goals stand, for a missed goal is a finding and no error."""
    options, root = parse_options(sys.argv[1:] if argv is None else argv)
    console = Console()
    # Into a file or a pipe: wide enough for the tables, whatever the terminal is.
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    where = Surroundings(commit(), machine())
    blocks = asyncio.run(measure(options, console))
    report(options, blocks, console, where, root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
