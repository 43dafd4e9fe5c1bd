"""What `make bench-speculation` runs, and its command line."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.harness import BENCH, MIN_PAIRS
from bench.options import integers, names, numbers
from galley.bench.workloads import PROMPT_SETS

LOOPS, CLOSED_FORM = "loops", "closed-form"
PARTS = (LOOPS, CLOSED_FORM)


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """`cores` for each side; `threads` a service; `fixed` of the fixed arms are paired, the best scouted."""

    streams: tuple[int, ...] = (1, 8, 16, 32)
    sets: tuple[str, ...] = PROMPT_SETS
    temperatures: tuple[float, ...] = (0.0, 0.7)
    strategies: tuple[str, ...] = ("ngram", "model", "hybrid")
    k: tuple[int, ...] = (2, 4, 8)
    fixed: int = 1
    fixed_alone: int = 2
    pairs: int = MIN_PAIRS
    max_tokens: int = 40
    busy_max_tokens: int = 24
    parts: tuple[str, ...] = PARTS
    peer: bool = True
    heldout_prompts: int = 24
    heldout_tokens: int = 48
    cores: int = 2
    threads: int = 1
    peer_threads: int = 2
    dtype: str = "bfloat16"
    model: str = ""
    draft_model: str | None = None
    seed: int = 20261121
    quick: bool = False


def parse_options(argv: Sequence[str], description: str | None) -> tuple[SpeculationOptions, Path | None]:
    """Read the command line; exits 2 with a message if a value is wrong. The path is None for no record."""
    parser = _parser(description)
    given = vars(parser.parse_args(argv))
    root: Path | None = given.pop("results")
    given["peer"] = not given.pop("no_peer")
    options = SpeculationOptions(**given)
    if problem := _problem(options):
        parser.error(problem)
    if options.quick:
        options, root = _quick(options), None
    return options, root


def _parser(description: str | None) -> argparse.ArgumentParser:
    default = SpeculationOptions()
    parser = argparse.ArgumentParser(
        prog="python -m bench.speculation",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--streams", type=integers, default=default.streams, help="comma separated")
    add("--sets", type=names, default=default.sets, help=f"of {', '.join(PROMPT_SETS)}")
    add("--temperatures", type=numbers, default=default.temperatures)
    add("--strategies", type=names, default=default.strategies, help="with a fixed k")
    add("--k", type=integers, default=default.k)
    add("--fixed", type=int, default=default.fixed, help="of these, the best scouted, in each pair")
    add("--fixed-alone", type=int, default=default.fixed_alone, help="the same at 1 stream")
    add("--pairs", type=int, default=default.pairs, help=f"at least {MIN_PAIRS}")
    add("--max-tokens", type=int, default=default.max_tokens, help="of an answer at 1 stream")
    add("--busy-max-tokens", type=int, default=default.busy_max_tokens, help="and at more")
    add("--parts", type=names, default=default.parts, help=f"of {', '.join(PARTS)}")
    add("--no-peer", action="store_true", help="without transformers' assisted generation")
    add("--heldout-prompts", type=int, default=default.heldout_prompts, help="of the closed form")
    add("--heldout-tokens", type=int, default=default.heldout_tokens)
    add("--cores", type=int, default=default.cores, help="of this machine, for each side")
    add("--threads", type=int, default=default.threads, help="a service")
    add("--peer-threads", type=int, default=default.peer_threads)
    add("--dtype", default=default.dtype)
    add("--model", default=default.model, help="default: the stack's own")
    add("--draft-model", default=default.draft_model, help="default: the one trained for the default model")
    add("--seed", type=int, default=default.seed)
    add("--quick", action="store_true", help="two streams, one short pair, no record, no goals")
    add("--results", type=Path, default=BENCH / "results")
    return parser


def _problem(options: SpeculationOptions) -> str:
    if unknown := set(options.sets) - set(PROMPT_SETS):
        return f"--sets: no set {', '.join(sorted(unknown))}; there are {', '.join(PROMPT_SETS)}"
    if unknown := set(options.parts) - set(PARTS):
        return f"--parts: no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}"
    if options.pairs < MIN_PAIRS and not options.quick:
        return f"--pairs: at least {MIN_PAIRS}"
    if min(*options.streams, *options.k, options.max_tokens, options.busy_max_tokens, options.threads) < 1:
        return "--streams, --k, --max-tokens, --busy-max-tokens and --threads: at least 1"
    return ""


def _quick(options: SpeculationOptions) -> SpeculationOptions:
    return dataclasses.replace(
        options,
        streams=tuple(streams for streams in options.streams if streams <= 2) or options.streams[:1],
        sets=options.sets[:1],
        temperatures=options.temperatures[:1],
        k=options.k[:1],
        pairs=1,
        max_tokens=min(12, options.max_tokens),
        busy_max_tokens=min(12, options.busy_max_tokens),
        heldout_prompts=min(2, options.heldout_prompts),
        heldout_tokens=min(12, options.heldout_tokens),
    )
