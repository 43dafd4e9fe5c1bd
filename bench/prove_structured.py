"""Prove that structured answers have their form and the same tokens everywhere: `make prove-structured`.

It is the long form of tests/e2e/test_structured.py. The requests have schemas of tests/structured/schemas,
some with a prediction, regular expressions, choices, grammars and structural tags, each at all temperatures
and with several seeds. Real processes answer them with the default model in float32:

- with speculation off, one at a time: the tokens that all other answers must equal;
- with every draft strategy, k from 1 to 16, and with AUTO, alone and 16 at a time;
- while gateways, targets and drafts are killed by turns, and streams break and are resumed elsewhere;
- over HTTP, by a copy of the model that calls tools and reasons: calls that are required, of any tool and of
  a named one, and schemas after reasoning;
- with vLLM as the engine, if `make venv-vllm` was run: there tokens must equal vLLM's own with speculation
  off, one at a time. Answers in company, whose batches have other shapes, are only checked for their form.

A finished answer must be valid for a validator that is no part of the grammars; a token that its grammar does
not allow counts as a problem, in an unfinished answer too. So does a run that reads too little to prove
anything: few finished answers, few kills, no token that a grammar forces.

Writes bench/results/structured_proof.json; exits 1 if there is a problem.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from bench.harness import BENCH, result_path, write_record
from galley.client.client import AsyncClient
from galley.client.options import Retries
from galley.common.models.files import DEFAULT_MODEL
from galley.core.names import GRAMMAR, HYBRID, MODEL, NGRAM, NO_STRATEGY, PREDICTION
from galley.engine.load.resolve import resolve_model
from galley.stack.parts import find_vllm_python
from galley.stack.stack import Stack, StackOptions
from tests.e2e.matrix import Case
from tests.e2e.stacks import DRAFT_LAYERS
from tests.fakes.http_client import http_client
from tests.fakes.truncated_model import truncate_model
from tests.structured.chats import chat_model, chats, read_chat
from tests.structured.forms import SEEDS, TEMPERATURES, FormRequest, requests
from tests.structured.trial import RESUMED_EVERY, STRUCK_EVERY, Tally, Trial, reader, vocabulary_of

LENGTHS = (1, 2, 4, 8, 16)
CROWD = 16
LEAST_ANSWERS = 3000
PARTS = ("off", "drafts", "kills", "chats", "vllm")
_CASE, _FEW = 84, 252
"""Requests that a case of a draft reads, spread over all; and those that are read under kills and by vLLM."""
_CHAT_CASES = (Case("auto", 0, 1), Case(NGRAM, 16, CROWD), Case(MODEL, 4, 1), Case(HYBRID, 8, CROWD))
_KILLED = ("target-2", "gateway", "draft", "target", "gateway-2")
# A busy machine may saturate a gateway for a while.
_RETRIES = Retries(patience_s=300.0, start_patience_s=300.0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the proof; return 0 if it holds."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.prove_structured",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--requests",
        type=int,
        help="most requests, and most chats (default: each form, temperature and seed)",
    )
    parser.add_argument(
        "--temperatures",
        type=lambda text: [float(each) for each in text.split(",")],
        default=TEMPERATURES,
        help="with commas (default: %(default)s)",
    )
    parser.add_argument(
        "--seeds", type=int, default=SEEDS, help="seeds at each temperature above 0 (default: %(default)s)"
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="with commas (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=BENCH / "results")
    given = parser.parse_args(argv)
    chosen = given.parts.split(",")
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"--parts: must be of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(prefix="galley-prove-") as folder:
        path = result_path("structured_proof", given.results)
        proof = Proof(given.requests, given.temperatures, given.seeds, chosen, path)
        asyncio.run(proof.run(Path(folder)))
    return 1 if proof.problems else 0


class Proof:
    """The parts and their tallies; the record is written after each case, so that a run cut short has one."""

    def __init__(
        self, count: int | None, temperatures: Sequence[float], seeds: int, parts: Sequence[str], path: Path
    ) -> None:
        self._is_whole = count is None
        self._requests = requests(count, temperatures, seeds)
        self._chats = chats(temperatures, seeds)[:count]
        self._temperatures = list(temperatures)
        self._seeds = seeds
        self._parts = parts
        self._path = path
        self._began_s = time.monotonic()
        self._tallies: dict[str, dict[str, Any]] = {}
        self._complete = False

    @property
    def problems(self) -> list[str]:
        problems = [problem for tally in self._tallies.values() for problem in tally["problems"]]
        return problems + self._shortfalls() if self._complete else problems

    def _shortfalls(self) -> list[str]:
        """Return what this run has read too little of to prove anything."""
        floors = {"finished": self._total("answers") // 2}
        if self._is_whole and set(self._parts) == set(PARTS):
            floors["answers"] = LEAST_ANSWERS
        if "kills" in self._parts:
            few = len(self._requests[:_FEW])
            floors |= {"kills": few // STRUCK_EVERY, "resumed": few // RESUMED_EVERY // 2}
        read = {name: (self._total(name), least) for name, least in floors.items()}
        if "drafts" in self._parts and any("prediction" in it.form.option for it in self._requests):
            predicted = sum(tally["sources"].get(PREDICTION, 0) for tally in self._tallies.values())
            read["predicted"] = (predicted, 1)
        return [f"{name}: {got} of at least {least}" for name, (got, least) in read.items() if got < least]

    def _total(self, name: str) -> int:
        return sum(tally[name] for tally in self._tallies.values())

    async def run(self, folder: Path) -> None:
        model = resolve_model(DEFAULT_MODEL)
        if set(self._parts) - {"vllm", "chats"}:
            await self._run_paged(model, folder)
        if "chats" in self._parts:
            await self._run_chats(chat_model(model, folder / "chats"), folder)
        if "vllm" in self._parts:
            await self._run_vllm(model)
        self._complete = True
        for problem in self._shortfalls():
            print("PROBLEM:", problem, flush=True)
        self._write()

    async def _run_paged(self, model: Path, folder: Path) -> None:
        draft = truncate_model(model, list(DRAFT_LAYERS), folder / "draft")
        paged = StackOptions(
            draft_model=str(draft), strategy=NGRAM, dtype="float32", gateways=2, replicas=2, drafts=2
        )
        async with Stack(paged) as stack:
            trial = await self._learnt(stack, model, "off", self._requests)
            if "drafts" in self._parts:
                await self._read_with_drafts(trial, stack)
            if "kills" in self._parts:
                await self._read_under_kills(trial, stack)

    async def _learnt(self, stack: Stack, model: Path, name: str, requests: Sequence[FormRequest]) -> Trial:
        async with AsyncClient(stack.gateways, retries=_RETRIES) as client:
            trial = Trial(requests, await vocabulary_of(client, model))
            await trial.learn(reader(client))
        self._note(name, trial)
        return trial

    async def _run_chats(self, model: Path, folder: Path) -> None:
        draft = truncate_model(model, list(DRAFT_LAYERS), folder / "chats_draft")
        options = StackOptions(
            model=str(model), draft_model=str(draft), strategy=NGRAM, dtype="float32", http_port=0
        )
        async with Stack(options) as stack, http_client(stack.http_addresses[0]) as client:
            trial, read = Trial(self._chats), partial(read_chat, client.raw)
            await trial.learn(read)
            self._note("chats off", trial)
            for case in _CHAT_CASES:
                await trial.compare(read, case)
                self._note(f"chats {case}", trial, needs=GRAMMAR)

    async def _read_with_drafts(self, trial: Trial, stack: Stack) -> None:
        step = max(3, len(self._requests) // _CASE)
        async with AsyncClient(stack.gateways, retries=_RETRIES) as client:
            for number, case in enumerate(draft_cases()):
                await trial.compare(reader(client), case, slice(number % step, None, step))
                self._note(str(case), trial, needs=GRAMMAR if case.k else "")

    async def _read_under_kills(self, trial: Trial, stack: Stack) -> None:
        await trial.compare_under_kills(stack, _KILLED, Case(HYBRID, 4, CROWD), slice(_FEW))
        self._note("kills", trial)

    async def _run_vllm(self, model: Path) -> None:
        options = StackOptions(
            draft_model="none",
            strategy=NGRAM,
            dtype="float32",
            engine="vllm",
            vllm_args='{"block_size": 32}',
            target_python=find_vllm_python(None),
        )
        async with Stack(options) as stack, AsyncClient(stack.gateways, retries=_RETRIES) as client:
            trial = await self._learnt(stack, model, "vllm off", self._requests[:_FEW])
            for case in (Case(NGRAM, 4, 1), Case("auto", 0, 1)):
                await trial.compare(reader(client), case, slice(0, None, 3))
                self._note(f"vllm {case}", trial)
            await trial.compare(reader(client), Case(NGRAM, 4, CROWD), exact=False)
            self._note("vllm in company", trial)

    def _note(self, name: str, trial: Trial, *, needs: str = "") -> None:
        """Add what was read since the last note, accepted tokens of the source that it `needs` among it."""
        tally, trial.tally = trial.tally, Tally()
        if needs and not tally.sources.get(needs):
            tally.problems.append(f"{name}: no token of {needs} was accepted")
        self._tallies[name] = asdict(tally)
        print(name, {key: value for key, value in asdict(tally).items() if key != "problems"}, flush=True)
        for problem in tally.problems:
            print("PROBLEM:", problem, flush=True)
        self._write()

    def _write(self) -> None:
        counts = ("answers", "finished", "tokens", "kills", "resumed")
        record = {
            "complete": self._complete,
            "seconds": round(time.monotonic() - self._began_s),
            "parts": list(self._parts),
            "requests": len(self._requests),
            "chats": len(self._chats),
            "temperatures": self._temperatures,
            "seeds": self._seeds,
            **{name: self._total(name) for name in counts},
            "problems": self.problems,
            "cases": self._tallies,
        }
        write_record(self._path, record)


def draft_cases() -> list[Case]:
    """Return every strategy with every k, alone or in company by turns; AUTO and no speculation, too."""
    kinds = [(strategy, k) for strategy in (NGRAM, MODEL, HYBRID) for k in LENGTHS]
    return [
        Case("off", 0, CROWD),
        Case("auto", 0, 1),
        Case("auto", 0, CROWD),
        Case(NO_STRATEGY, LENGTHS[-1], CROWD),
        *(Case(strategy, k, (1, CROWD)[number % 2]) for number, (strategy, k) in enumerate(kinds)),
    ]


if __name__ == "__main__":
    sys.exit(main())
