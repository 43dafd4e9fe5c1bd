"""Prove that every draft, k and number of streams gives the same tokens: `make prove-tokens`.

It is the long form of tests/e2e/test_same_tokens.py and test_same_tokens_bf16.py. It runs the real default
model in real processes, with every draft (none, ngram, model, hybrid, oracle at three rates of spoiled
tokens) and k in {1, 4, 8}, with AUTO, and without speculation.

In float32, greedy answers of up to 96 tokens, alone and eight at a time, must equal transformers' own
`generate`. Near ties (two best logits within 1e-4) are excused and printed. At temperatures 0.8 and 1.2, with
top-p, top-k, min-p and penalties, shorter answers, alone or eight at a time, must equal our own plain
decoding for the same seed, with the same excuse.

In bfloat16, answers at temperatures 0, 0.7 and 1.0, alone and eight at a time, must equal those of plain
decoding of one answer at a time. Nothing is excused.

Several stacks share the cases. The number of accepted tokens depends on when hints arrive, so the counts in
the record are those of this run. Writes bench/results/tokens.json; exits 1 if a token differs.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from bench.harness import result_path, write_record
from galley.client.options import GenerateOptions
from galley.common.models.files import DEFAULT_MODEL
from galley.common.models.tokenizer import Tokenizer
from galley.engine.load.resolve import resolve_model
from tests.e2e.matrix import Answer, Case, accepted_per_round, all_cases, pairwise_cases, read_answers
from tests.e2e.prompts import PROMPTS, encode
from tests.e2e.reference import Reference
from tests.e2e.stacks import DRAFT_LAYERS, Clients, running_clients
from tests.fakes.truncated_model import truncate_model

PLAIN = Case("off", 0, 8)
ALONE = Case("off", 0, 1)
KINDS: dict[str, GenerateOptions] = {
    "greedy": GenerateOptions(temperature=0.0),
    "T0.8 top_p": GenerateOptions(temperature=0.8, seed=101, top_p=0.95),
    "T1.2 top_k min_p penalties": GenerateOptions(
        temperature=1.2,
        seed=102,
        top_k=50,
        min_p=0.02,
        frequency_penalty=0.4,
        presence_penalty=0.3,
        repetition_penalty=1.1,
    ),
}
BF16_KINDS: dict[str, GenerateOptions] = {
    "bf16 greedy": GenerateOptions(temperature=0.0),
    "bf16 T0.7": GenerateOptions(temperature=0.7, seed=103),
    "bf16 T1.0": GenerateOptions(temperature=1.0, seed=104),
}


def main() -> int:
    """Run the proof; return 0 if no token differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="number of prompts (default: all)")
    parser.add_argument(
        "--max-tokens", type=int, default=96, help="tokens of a greedy answer (default: %(default)s)"
    )
    parser.add_argument(
        "--sampled-tokens", type=int, default=32, help="tokens of a sampled answer (default: %(default)s)"
    )
    parser.add_argument("--stacks", type=int, default=2, help="stacks in parallel (default: %(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="galley-prove-") as folder:
        proof = asyncio.run(_prove(Path(folder), arguments))
    return 1 if proof.differences else 0


async def _prove(folder: Path, arguments: argparse.Namespace) -> Proof:
    model = resolve_model(DEFAULT_MODEL)
    prompts = PROMPTS[: arguments.prompts]
    prompt_tokens = encode(Tokenizer.load(str(model)), prompts)
    draft = truncate_model(model, list(DRAFT_LAYERS), folder / "draft")
    about = {
        "prompts": len(prompts),
        "max_tokens": arguments.max_tokens,
        "sampled_tokens": arguments.sampled_tokens,
    }
    proof = Proof(Reference(model), prompts, prompt_tokens, about)
    for dtype, kinds in (("float32", KINDS), ("bfloat16", BF16_KINDS)):
        async with AsyncExitStack() as cleanup:
            stacks = [
                await cleanup.enter_async_context(
                    running_clients(_made(folder / f"{dtype}-{number}"), draft, dtype=dtype)
                )
                for number in range(arguments.stacks)
            ]
            for kind, options in kinds.items():
                greedy = options["temperature"] == 0.0
                length = arguments.max_tokens if greedy else arguments.sampled_tokens
                cases = all_cases() if greedy or kind in BF16_KINDS else pairwise_cases()
                await proof.run(stacks, kind, {**options, "max_tokens": length}, cases)
    proof.complete = True
    proof.write()
    return proof


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


class Proof:
    """The cases and their results; the record is written after each, so that a run cut short has one."""

    def __init__(
        self,
        reference: Reference,
        prompts: Sequence[Any],
        prompt_tokens: Sequence[Sequence[int]],
        about: Mapping[str, Any],
    ) -> None:
        self.complete = False
        self.differences: list[str] = []
        self._began = time.monotonic()
        self._about = about
        self._path = result_path("tokens")
        self._reference = reference
        self._prompts = prompts
        self._prompt_tokens = prompt_tokens
        self._cases: list[dict[str, Any]] = []
        self._excuses: list[str] = []
        self._accepted_counts: set[int] = set()

    async def run(
        self, stacks: Sequence[Clients], kind: str, options: GenerateOptions, cases: Sequence[Case]
    ) -> None:
        """Run the cases of one kind of sampling; each stack takes the next when it is free."""
        expected = await self._expected(stacks[0], kind, options)
        for clients in stacks:
            clients.teach([[*p, *a] for p, a in zip(self._prompt_tokens, expected, strict=True)])
        left = iter(cases)

        async def work(clients: Clients) -> None:
            for case in left:
                await self._check(clients, kind, options, case, expected)

        await asyncio.gather(*(work(clients) for clients in stacks))

    async def _check(  # one case and all that it needs
        self,
        clients: Clients,
        kind: str,
        options: GenerateOptions,
        case: Case,
        expected: Sequence[Sequence[int]],
    ) -> None:
        began = time.monotonic()
        answers = await read_answers(clients.of(case), self._prompts, options, case)
        for number, (answer, tokens) in enumerate(zip(answers, expected, strict=True)):
            what = f"{kind}, {case}, prompt {number}"
            self._compare(what, number, answer, tokens, exact=kind in BF16_KINDS)
        self._count(kind, case, answers, time.monotonic() - began)

    async def _expected(self, clients: Clients, kind: str, options: GenerateOptions) -> list[list[int]]:
        if kind not in BF16_KINDS and options["temperature"] == 0.0:
            length = options["max_tokens"] or 0
            return [self._reference.greedy(prompt, length) for prompt in self._prompt_tokens]
        plain = ALONE if kind in BF16_KINDS else PLAIN
        return [
            list(answer.tokens) for answer in await read_answers(clients.main, self._prompts, options, plain)
        ]

    def _compare(
        self, what: str, number: int, answer: Answer, expected: Sequence[int], *, exact: bool
    ) -> None:
        """Note a difference; unless the tokens must be `exact`, the float32 reference may excuse it."""
        if list(answer.tokens) == list(expected):
            return
        if exact:
            self.differences.append(f"{what}: {list(answer.tokens)} is not {list(expected)}")
            return
        try:
            excuse = self._reference.excuse(self._prompt_tokens[number], answer.tokens, expected)
        except AssertionError as difference:
            self.differences.append(f"{what}: {difference}")
        else:
            self._excuses.append(f"{what}: {excuse}")
            print("excused:", self._excuses[-1], flush=True)

    def _count(self, kind: str, case: Case, answers: Sequence[Answer], seconds: float) -> None:
        for answer in answers:
            self._accepted_counts |= accepted_per_round(answer)
        counted = {
            "kind": kind,
            "case": str(case),
            "tokens": sum(len(answer.tokens) for answer in answers),
            "drafted": sum(answer.stats.drafted for answer in answers),
            "accepted": sum(answer.stats.accepted for answer in answers),
            "rounds": sum(answer.stats.rounds for answer in answers),
            "seconds": round(seconds, 1),
        }
        self._cases.append(counted)
        print(counted, "differences:", len(self.differences), flush=True)
        self.write()

    def write(self) -> None:
        """Write the record of the cases so far."""
        record = {
            **self._about,
            "complete": self.complete,
            "seconds": round(time.monotonic() - self._began),
            "seeds": [options.get("seed") for options in (KINDS | BF16_KINDS).values()],
            "compared_tokens": sum(case["tokens"] for case in self._cases),
            "differences": self.differences,
            "excuses": self._excuses,
            "accepted_counts": sorted(self._accepted_counts),
            "cases": self._cases,
        }
        write_record(self._path, record)


if __name__ == "__main__":
    sys.exit(main())
