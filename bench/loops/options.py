"""The options of a loop benchmark, and their flags."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.harness import MIN_PAIRS
from galley.bench.workloads import FIXED_SETS, Workload, fixed_workload, mixed_workload, own_workload
from galley.common.models.files import DEFAULT_MODEL

# All prompt sets in turn, as one workload.
MIXED = "mixed"
WORKLOADS = (MIXED, *FIXED_SETS)
_QUICK_STREAMS, _QUICK_TOKENS = 2, 12


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a loop benchmark.

    A life starts all processes anew and runs `pairs` pairs; a pair is every workload, number of streams and
    temperature, answered by every arm. At one stream a block has `prompts_per_block` prompts, at more `turns`
    a stream. Files of `prompts` take the place of `workloads`.
    """

    arms: tuple[str, ...]
    streams: tuple[int, ...] = (1, 8, 16)
    temperatures: tuple[float, ...] = (0.0, 0.7)
    workloads: tuple[str, ...] = (MIXED,)
    lives: int = 1
    pairs: int = MIN_PAIRS
    prompts: tuple[str, ...] = ()
    by_category: bool = False
    prompts_per_block: int = 3
    turns: int = 2
    max_tokens: int = 32
    threads: int = 1
    cores: int = 2
    dtype: str = "bfloat16"
    model: str = DEFAULT_MODEL
    draft_model: str | None = None
    delay_ms: float = 20.0
    mbit_s: float = 0.0
    base: str = ""
    seed: int = 20261123
    quick: bool = False


def workloads_of(options: Options) -> list[Workload]:
    """Return the workloads; those of a file or a set by category if asked for. Raises ValueError, OSError."""
    if options.prompts:
        found = [own_workload(Path(path)) for path in options.prompts]
    else:
        found = [mixed_workload() if name == MIXED else fixed_workload(name) for name in options.workloads]
    return [part for one in found for part in (one.by_category() if options.by_category else [one])]


def names(text: str) -> tuple[str, ...]:
    """Split comma-separated names."""
    return tuple(filter(None, text.split(",")))


def integers(text: str) -> tuple[int, ...]:
    """Split comma-separated integers; raises ValueError, which argparse turns into a message."""
    return tuple(int(part) for part in text.split(","))


def numbers(text: str) -> tuple[float, ...]:
    """Split comma-separated numbers; raises ValueError, which argparse turns into a message."""
    return tuple(float(part) for part in text.split(","))


def add_flags(parser: argparse.ArgumentParser, default: Options) -> None:
    """Add the flags of every loop benchmark, with this benchmark's defaults."""
    kinds = {
        "arms": names,
        "workloads": names,
        "prompts": names,
        "streams": integers,
        "temperatures": numbers,
    }
    helps = {
        "arms": "what is compared, comma-separated",
        "streams": "numbers of streams, comma-separated",
        "temperatures": "sampling temperatures, comma-separated",
        "workloads": f"of {', '.join(WORKLOADS)}, comma-separated",
        "prompts": "files of prompts in place of --workloads, comma-separated",
        "lives": "starts of all processes",
        "pairs": f"pairs of each life; {MIN_PAIRS} in all for figures to rely on",
        "prompts_per_block": "prompts of a block at one stream",
        "turns": "prompts a stream of a block at more streams",
        "max_tokens": "tokens of an answer, in the mean",
        "threads": "threads of each service",
        "cores": "cores of this machine that all processes of a side share",
        "dtype": "data type of the weights",
        "model": "target model: hub id or directory",
        "draft_model": "draft model; empty: the one trained for the default model",
        "delay_ms": "delay each way of slow links, in ms",
        "mbit_s": "bandwidth of slow links, each way, in Mbit/s; 0: not limited",
        "base": "revision to compare this tree with",
        "seed": "seed of the first request",
    }
    for field in dataclasses.fields(Options):
        if field.name not in helps:
            continue
        value = getattr(default, field.name)
        text = ",".join(map(str, value)) if isinstance(value, tuple) else value
        kind = kinds.get(field.name) or (type(value) if value is not None else str)
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, default=value, help=f"{helps[field.name]} (default: {text})")
    parser.add_argument("--by-category", action="store_true", help="make each category a workload of its own")


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str], default: Options, baselines: frozenset[str]
) -> tuple[Options, Path | None]:
    """Return the options and the folder of the record (None: no record); exit 2 for a wrong value."""
    add_flags(parser, default)
    values = vars(parser.parse_args(argv))
    root: Path | None = values.pop("results")
    options = Options(**values)
    if options.prompts:  # which the record then says
        options = dataclasses.replace(options, workloads=())
    if problem := _problem(options, baselines):
        parser.error(problem)
    if options.quick:
        return _quick(options), None
    least = min(MIN_PAIRS, default.lives * default.pairs)
    if options.lives * options.pairs < least:
        parser.error(f"--pairs: must be at least {least} in all lives, got {options.lives * options.pairs}")
    return options, root


def _problem(options: Options, baselines: frozenset[str]) -> str:
    if missing := baselines - set(options.arms):
        return f"--arms: must include {', '.join(sorted(missing))}, with which the others are compared"
    if unknown := set(options.workloads) - set(WORKLOADS):
        return f"--workloads: must be of {', '.join(WORKLOADS)}, got {', '.join(sorted(unknown))}"
    try:
        workloads_of(options)
    except (OSError, ValueError) as error:
        return f"--prompts: {error}"
    for name in ("lives", "pairs", "prompts_per_block", "turns", "max_tokens", "threads", "cores"):
        if getattr(options, name) < 1:
            return f"--{name.replace('_', '-')}: must be at least 1, got {getattr(options, name)}"
    if min(options.streams) < 1:
        return f"--streams: must be at least 1, got {min(options.streams)}"
    if options.delay_ms < 0:
        return f"--delay-ms: must be at least 0, got {options.delay_ms:g}"
    return ""


def _quick(options: Options) -> Options:
    few = tuple(streams for streams in options.streams if streams <= _QUICK_STREAMS)
    return dataclasses.replace(
        options,
        lives=1,
        pairs=1,
        turns=1,
        prompts_per_block=1,
        streams=few or (_QUICK_STREAMS,),
        temperatures=options.temperatures[:1],
        workloads=options.workloads[:1],
        prompts=options.prompts[:1],
        max_tokens=min(_QUICK_TOKENS, options.max_tokens),
    )
