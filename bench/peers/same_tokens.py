"""Measure how often drafts and company change a token: `make bench-same-tokens`.

An engine answers prompts without drafts, one at a time. Then it answers them eight at a time, and, alone and
eight at a time, with draft tokens that are right, wrong, spoiled, from n-gram lookup and from the draft
model, 0 to 16 of them, drawn anew for each step; at temperatures 0 and 0.8, in float32 and bfloat16. The
table has the rate of positions with another token, beside vLLM's own between alone and in company and with
its n-gram drafts. In float32 each difference is listed with the distance of the two tokens' scores, by
transformers.

Galley's engines run in their processes without a gateway, so that every step has exactly the drafts that it
should have. `--engine paged` does the same over Galley's own engine.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.acceptance.heldout import proposals
from bench.harness import RESULTS, result_path, show_goals, write_record
from bench.loops.options import names, numbers
from bench.loops.run import keep_to_cores
from bench.loops.sides import ProcessLoop, process_loop
from bench.peers.differences import Row, Tie, count, first_difference, goals, table
from bench.peers.drafts import MAKERS, MAX_K, Drafts, lengths
from bench.peers.near_ties import Scores
from bench.peers.processes import VLLM_ARGS, Command, check_engine, galley_command, peer_command
from galley.bench.workloads import mixed_workload
from galley.common.models.files import DEFAULT_MODEL
from galley.common.models.tokenizer import Tokenizer
from galley.engine.load.resolve import resolve_model
from galley.stack.parts import stack_parts
from galley.stack.stack import Stack, StackOptions

MODEL = "model"
_TOGETHER = 8
_PEER = "vllm"


@dataclasses.dataclass(frozen=True, slots=True)
class Answers:
    """The tokens of each answer, and how many draft tokens were verified and accepted in all."""

    tokens: list[list[int]]
    verified: int
    accepted: int


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """The prompts and how they are answered: a column of the table."""

    dtype: str
    temperature: float
    prompts: Sequence[list[int]]
    max_tokens: int
    seed: int

    async def answers(self, side: ProcessLoop, streams: int, drafts: Sequence[Drafts] = ()) -> Answers:
        """Answer the prompts, `streams` at a time."""
        block: dict[str, Any] = {
            "streams": streams,
            "prompts": self.prompts,
            "max_tokens": [self.max_tokens] * len(self.prompts),
            "temperature": self.temperature,
            "seed": self.seed,
            "seeded": True,
        }
        found = (await side.answer({**block, "drafts": drafts} if drafts else block))["answers"]
        counts = (sum(answer.get(key, 0) for answer in found) for key in ("verified", "accepted"))
        return Answers([answer["tokens"] for answer in found], *counts)

    def row(self, engine: str, drafts: str, streams: int, answers: Answers, plain: Answers) -> Row:
        counts = (*count(answers.tokens, plain.tokens), answers.verified, answers.accepted)
        return Row(engine, self.dtype, self.temperature, drafts, streams, *counts)


class Measurement:
    def __init__(self, arguments: argparse.Namespace, model_dir: Path, folder: Path, draft: str) -> None:
        self.ours = f"galley-{arguments.engine}"
        self.builds: dict[str, Any] = {}
        self.rows: list[Row] = []
        self.ties: list[Tie] = []
        self._arguments = arguments
        self._model_dir = model_dir
        self._folder = folder
        self._draft = draft

    async def run(self, cells: Sequence[Cell]) -> None:
        """Measure all cells of one dtype, engine after engine."""
        dtype = cells[0].dtype
        flags = ("--engine", "vllm", "--vllm-args", VLLM_ARGS) if self._arguments.engine == "vllm" else ()
        command = galley_command(self._model_dir, dtype, self._arguments.threads, *flags)
        async with self._started(command) as side:
            check_engine(side.ready, *flags)
            self.builds[dtype] = side.ready
            for cell in cells:
                await self._measure(side, cell)
        if not self._arguments.peer:
            return
        async with self._started(peer_command(self._model_dir, dtype, _TOGETHER)) as side:
            plain = [await cell.answers(side, 1) for cell in cells]
            for cell, expected in zip(cells, plain, strict=True):
                await self._measure_peer(side, cell, "none", _TOGETHER, expected)
        async with self._started(peer_command(self._model_dir, dtype, _TOGETHER, ngram=True)) as side:
            for cell, expected in zip(cells, plain, strict=True):
                for streams in (1, _TOGETHER):
                    await self._measure_peer(side, cell, "ngram", streams, expected)

    def _started(self, command: Command) -> AbstractAsyncContextManager[ProcessLoop]:
        return process_loop(*command, self._folder / "engine.log", encode=lambda _: [])

    async def _measure_peer(
        self, side: ProcessLoop, cell: Cell, drafts: str, streams: int, plain: Answers
    ) -> None:
        self._add(cell.row(_PEER, drafts, streams, await cell.answers(side, streams), plain))

    async def _measure(self, side: ProcessLoop, cell: Cell) -> None:
        plain = await cell.answers(side, 1)
        arms: list[tuple[str, int, Sequence[Drafts]]] = [("none", _TOGETHER, ())]
        for kind in self._arguments.drafts:
            made = await self._drafts(kind, cell, plain)
            arms += [(kind, streams, made) for streams in (1, _TOGETHER)]
        for kind, streams, drafts in arms:
            answers = await cell.answers(side, streams, drafts)
            row = cell.row(self.ours, kind, streams, answers, plain)
            self._add(row)
            if cell.dtype == "float32" and row.differing:
                self.ties += await asyncio.to_thread(self._ties, cell, row, answers, plain)

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        cell = f"{row.engine}, {row.dtype} at {row.temperature:g}, {row.drafts}, {row.streams} streams"
        print(f"{cell}: {row}; {row.accepted} of {row.verified} draft tokens accepted", flush=True)

    async def _drafts(self, kind: str, cell: Cell, plain: Answers) -> list[Drafts]:
        labels = [f"{kind}, {cell.temperature:g}, {at}" for at in range(len(cell.prompts))]
        if kind != MODEL:
            return [MAKERS[kind](*of) for of in zip(labels, cell.prompts, plain.tokens, strict=True)]
        proposed = await proposals(
            self._draft, plain.tokens, cell.prompts, seed=cell.seed, temperature=cell.temperature, k=MAX_K
        )
        return [
            [list(draft[:k]) for draft, k in zip(drafts, lengths(label, len(drafts)), strict=True)]
            for label, drafts in zip(labels, proposed, strict=True)
        ]

    def _ties(self, cell: Cell, row: Row, answers: Answers, plain: Answers) -> list[Tie]:
        """Return each difference of a row; where one of the answers ends, the distance is infinite."""
        scores = Scores(self._model_dir)
        found = []
        for at, (mine, other) in enumerate(zip(answers.tokens, plain.tokens, strict=True)):
            end = first_difference(mine, other)
            if end is None:
                continue
            gap = float("inf")
            if end < min(len(mine), len(other)):
                prefix = [*cell.prompts[at], *other[:end]]
                gap = scores.gap(prefix, (mine[end], other[end]), cell.temperature, cell.seed + at)
            found.append(Tie(row.drafts, row.streams, cell.temperature, at, end, gap))
        return found


async def measure(arguments: argparse.Namespace, model_dir: Path, folder: Path) -> Measurement:
    """Measure every dtype; the draft runs beside the engines."""
    tokenizer = Tokenizer.load(str(model_dir))
    texts = [prompt.text for prompt in mixed_workload().prompts[: arguments.prompts]]
    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]
    needed = {"model", "draft-model", "draft"} if MODEL in arguments.drafts else set()
    given = StackOptions(model=arguments.model, dtype="bfloat16")
    only_draft = Stack(given, parts=lambda *of: [part for part in stack_parts(*of) if part.name in needed])
    async with only_draft as stack:
        draft = stack.address("draft") if needed else ""
        measurement = Measurement(arguments, model_dir, folder, draft)
        for dtype in arguments.dtypes:
            await measurement.run(
                [
                    Cell(dtype, temperature, prompts, arguments.max_tokens, arguments.seed)
                    for temperature in arguments.temperatures
                ]
            )
    return measurement


def main() -> int:
    """Run the benchmark; return 0 even if a goal is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers.same_tokens",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = (*MAKERS, MODEL)
    parser.add_argument("--engine", choices=("vllm", "paged"), default="vllm")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="without vLLM's own rate")
    parser.add_argument("--dtypes", type=names, default=("float32", "bfloat16"))
    parser.add_argument("--temperatures", type=numbers, default=(0.0, 0.8))
    parser.add_argument("--drafts", type=names, default=kinds, help=f"of {', '.join(kinds)}")
    parser.add_argument("--prompts", type=int, default=12, help="prompts of each cell (default: %(default)s)")
    parser.add_argument(
        "--max-tokens", type=int, default=48, help="tokens of an answer (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=2, help="threads of the engine (default: %(default)s)")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="hub id or directory")
    parser.add_argument("--seed", type=int, default=20261126, help="seed of the first answer")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the record")
    arguments = parser.parse_args()
    if unknown := set(arguments.drafts) - set(kinds):
        parser.error(f"--drafts: must be of {', '.join(kinds)}, got {', '.join(sorted(unknown))}")
    keep_to_cores(2)
    with tempfile.TemporaryDirectory(prefix="galley-bench-") as folder:
        found = asyncio.run(measure(arguments, resolve_model(arguments.model), Path(folder)))
    report(found, arguments)
    return 0


def report(found: Measurement, arguments: argparse.Namespace) -> None:
    """Print table, ties and goals, and write the record."""
    console = Console(width=150)
    console.print(table(found.rows))
    judged = goals(found.rows, found.ties, found.ours, _PEER)
    show_goals(console, judged, [*map(str, found.ties)])
    of = {name: getattr(arguments, name) for name in ("prompts", "max_tokens", "threads", "model", "seed")}
    record = {
        "options": of,
        "builds": found.builds,
        "rows": found.rows,
        "ties": found.ties,
        "goals": judged,
    }
    write_record(result_path(f"same-tokens-{arguments.engine}", arguments.results), record)


if __name__ == "__main__":
    sys.exit(main())
