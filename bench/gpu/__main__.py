"""`make bench-gpu`: what a step costs on a CUDA device, and how often its other rows change a token.

Sides alternate on the default model in bfloat16: attention by FlexAttention over pages in place or by plain
torch, recorded by CUDA graphs or not, with steps of one shape (invariant) or not. A step feeds 1 to 320 rows
and samples all of them greedily, so that it ends with its one wait for the device. Chains of draft tokens are
timed beside trees of as many. Then texts are fed row by row, alone, and again in chunks together with others.
The tokens sampled at each position are compared.

Without a CUDA device it prints an error and exits 2. It has never run on one.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.engine.sides import Case, OurStep
from bench.harness import BENCH, MIN_PAIRS, result_path, write_record
from bench.paired import alternate
from galley.bench.workloads import fixed_workload
from galley.common.models.files import DEFAULT_MODEL
from galley.common.models.tokenizer import Tokenizer
from galley.core.kv.blocks import BLOCK_TOKENS
from galley.core.sampling_params import SamplingParams
from galley.core.step import Draw, Sampled, StepChunk
from galley.engine.cuda.device import DeviceOptions
from galley.engine.load.resolve import resolve_model
from galley.engine.model import CausalModel
from galley.engine.sampler import draw_all

SIDES = {
    "flex, graphs": DeviceOptions(),
    "flex": DeviceOptions(graphs=False),
    "torch": DeviceOptions(flex=False, graphs=False),
    "invariant, graphs": DeviceOptions(invariant=True),
    "invariant": DeviceOptions(invariant=True, graphs=False),
}
SPLITS = ((1, 1), (8, 1), (8, 5), (80, 1), (64, 5))
CONTEXTS = (256, 1024)
# Sessions, and a confirmed token and the draft tokens of each.
TREE_SPLITS, WIDTHS = ((1, 9), (8, 9), (32, 9), (1, 33)), (1, 2)
CASES = (
    *(Case(*split, context) for context in CONTEXTS for split in SPLITS),
    *(Case(*split, CONTEXTS[0], width) for split in TREE_SPLITS for width in WIDTHS),
)
TEMPERATURES = (0.0, 1.0)
_SEQUENCES, _LENGTH = 64, 256
_COMPANY = 16
_CHUNKS = (1, 2, 5, 16)


@dataclass(frozen=True, slots=True)
class Differing:
    """The number of `positions`, and of those at which a batch changed the sampled token."""

    temperature: float
    positions: int
    differing: int

    @property
    def per_million(self) -> float:
        """Return the differing tokens per million positions."""
        return 1e6 * self.differing / self.positions


class SampledStep:
    """A step with greedy sampling of all its rows."""

    def __init__(self, model: CausalModel, case: Case) -> None:
        self._step = OurStep(model, case)
        greedy = SamplingParams(temperature=0.0)
        self._draws = [
            Draw(greedy, (0,), 1, frozenset(), 0, tuple(chunk.tokens[1:]), chunk.parents)
            for chunk in self._step.chunks
        ]

    def __call__(self) -> object:
        """Run one step and wait for the device."""
        return draw_all(self._step(), self._draws)


def step_times(models: Mapping[str, CausalModel], case: Case, pairs: int) -> dict[str, Any]:
    """Return the wall seconds of a step by side, for each pair."""
    times = alternate({name: SampledStep(model, case) for name, model in models.items()}, pairs)
    return {
        "sessions": case.sessions,
        "tokens": case.tokens,
        "context": case.context,
        "width": case.width,
        "rows": case.rows,
        "wall_s": {name: list(timed.wall_s) for name, timed in times.items()},
    }


def differing(model: CausalModel, texts: Sequence[Sequence[int]], company: int) -> list[Differing]:
    """Sample at all positions of `texts` row by row, alone, and again in chunks, `company` texts at once."""
    alone = [_fed(model, [text], [1])[0] for text in texts]
    rng = random.Random(0)
    together: list[list[tuple[int, ...]]] = []
    for first in range(0, len(texts), company):
        some = texts[first : first + company]
        together += _fed(model, some, [rng.choice(_CHUNKS) for _ in range(97)])
    return [
        Differing(
            temperature,
            sum(map(len, texts)),
            sum(
                mine[i] != other[i]
                for own, their in zip(alone, together, strict=True)
                for mine, other in zip(own, their, strict=True)
            ),
        )
        for i, temperature in enumerate(TEMPERATURES)
    ]


def _fed(
    model: CausalModel, texts: Sequence[Sequence[int]], sizes: Sequence[int]
) -> list[list[tuple[int, ...]]]:
    """Return the tokens sampled after each position of each text, one for each temperature."""
    each = -(-max(map(len, texts)) // BLOCK_TOKENS)
    tables = [list(range(i * each, (i + 1) * each)) for i in range(len(texts))]
    drawn: list[list[tuple[int, ...]]] = [[] for _ in texts]
    step = 0
    while going := [i for i, text in enumerate(texts) if len(drawn[i]) < len(text)]:
        chunks = []
        for i in going:
            start = len(drawn[i])
            fed = texts[i][start : start + sizes[step % len(sizes)]]
            step += 1
            chunks.append(StepChunk(start, fed, tables[i], len(fed)))
        rows = torch.split(model.run(chunks), [len(chunk.tokens) for chunk in chunks])
        for i, chunk, logits in zip(going, chunks, rows, strict=True):
            drawn[i] += _drawn(logits, texts[i], chunk.start)
    return drawn


def _drawn(logits: torch.Tensor, text: Sequence[int], start: int) -> list[tuple[int, ...]]:
    """Return the token of each row of `logits` at each temperature; -1 if sampling failed."""
    by_temperature = []
    for temperature in TEMPERATURES:
        params = SamplingParams(temperature=temperature, seed=1)
        draws = [Draw(params, text[: start + row + 1], 1, frozenset(), 0) for row in range(logits.shape[0])]
        outcomes = draw_all(logits, draws)
        by_temperature.append([own.tokens[0] if isinstance(own, Sampled) else -1 for own in outcomes])
    return list(zip(*by_temperature, strict=True))


def texts_of(model_dir: Path, count: int, length: int) -> list[list[int]]:
    """Return `count` texts of `length` tokens, cut one after another from the prompts, which are repeated."""
    tokenizer = Tokenizer.load(str(model_dir))
    tokens = [
        token for prompt in fixed_workload("rewrite").prompts for token in tokenizer.encode(prompt.text)
    ]
    endless = tokens * (1 + count * length // len(tokens))
    return [endless[i * length : (i + 1) * length] for i in range(count)]


def load_sides(model_dir: Path, device: str, names: Sequence[str]) -> dict[str, CausalModel]:
    """Return a model for each side, all with room for the largest step."""
    blocks = max(case.blocks(BLOCK_TOKENS) for case in CASES)
    return {
        name: CausalModel.load(
            model_dir, dtype=torch.bfloat16, device=device, kv_blocks=blocks, options=SIDES[name]
        )
        for name in names
    }


def show(
    steps: Sequence[Mapping[str, Any]], rates: Mapping[str, Sequence[Differing]], console: Console
) -> None:
    """Print the step times and the differing tokens."""
    names = list(steps[0]["wall_s"])
    table = Table("rows", "sessions", "context", "width", *names, title="milliseconds of a step, median")
    for step in steps:
        times = [f"{median(step['wall_s'][name]) * 1e3:.3f}" for name in names]
        table.add_row(*(str(step[key]) for key in ("rows", "sessions", "context", "width")), *times)
    console.print(table)
    table = Table(
        "side", "temperature", "positions", "differing", "per million", title="tokens that other rows changed"
    )
    for name, found in rates.items():
        for one in found:
            numbers = (one.temperature, one.positions, one.differing, round(one.per_million, 1))
            table.add_row(name, *map(str, numbers))
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 2 without a CUDA device."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="hub id or directory (default: %(default)s)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--pairs", type=int, default=MIN_PAIRS)
    parser.add_argument("--results", type=Path, default=BENCH / "results")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench-gpu: torch finds no CUDA device here; nothing was measured", file=sys.stderr)
        return 2
    model_dir, console = resolve_model(options.model), Console()
    models = load_sides(model_dir, options.device, list(SIDES))
    steps = [step_times(models, case, options.pairs) for case in CASES]
    texts = texts_of(model_dir, _SEQUENCES, _LENGTH)
    rates = {name: differing(model, texts, _COMPANY) for name, model in models.items()}
    record = result_path("gpu", options.results)
    write_record(record, _record(options, models, steps, rates))
    show(steps, rates, console)
    console.print(f"record: {record}")
    return 0


def _record(
    options: argparse.Namespace,
    models: Mapping[str, CausalModel],
    steps: Sequence[Mapping[str, Any]],
    rates: Mapping[str, Sequence[Differing]],
) -> dict[str, Any]:
    return {
        "model": options.model,
        "gpu": {"name": torch.cuda.get_device_name(options.device), "cuda": torch.version.cuda},
        "sides": {
            name: {
                "attention": model.attention_kind,
                "deterministic": model.info.deterministic,
                "trees": model.info.trees,
            }
            for name, model in models.items()
        },
        "steps": list(steps),
        "differing": {
            name: [
                {"temperature": one.temperature, "positions": one.positions, "differing": one.differing}
                for one in found
            ]
            for name, found in rates.items()
        },
    }


if __name__ == "__main__":
    sys.exit(main())
