"""Prove that drafts that replace killed ones propose as those did: `make prove-shared-answers`.

A stack of the default model and two lookup drafts answers prompts of `extract`, without their schemas, twice.
Then both drafts are killed and started again, and the prompts are answered once more. The acceptance rate
must then be at least BOUND of that before. For comparison, drafts that share nothing do the same. The tokens
a round also depend on how many draft tokens the target verifies at its load, so they are only reported.
Writes bench/results/shared-answers.json, and exits 1 if the bound is missed or a token differs.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.harness import result_path, write_record
from galley import AsyncClient
from galley.bench.answers import Rounds
from galley.bench.closed_loop import GatewayLoop, Load
from galley.bench.summary import speculated
from galley.bench.workloads import EXTRACT, Prompt, fixed_workload
from galley.core.names import NGRAM, SHARED
from galley.stack.options import StackOptions
from galley.stack.parts import NO_DRAFT_MODEL
from galley.stack.stack import Stack

BOUND = 0.98
ARM = f"{NGRAM}-8"
DRAFTS = ("draft", "draft-2")
_MOST_PRIMING = 20
FIRST, AGAIN, REPLACED = "first", "again", "replaced"


@dataclass(frozen=True, slots=True)
class Pass:
    """All prompts, answered once."""

    rounds: Rounds
    tokens: tuple[tuple[int, ...], ...]

    @property
    def acceptance(self) -> float:
        return self.rounds.accepted / max(1, self.rounds.verified)

    def report(self) -> Mapping[str, object]:
        return {
            "acceptance": round(self.acceptance, 4),
            "tokens_per_round": round(self.rounds.tokens_per_round, 4),
            "accepted_by_source": {of.source: of.accepted for of in self.rounds.sources},
        }


def main() -> int:
    """Run the proof; return 0 if it holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=24, help="prompts of a pass (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens an answer (default: %(default)s)")
    parser.add_argument("--model", default="", help="target model (default: the stack's)")
    given = parser.parse_args()
    prompts = [replace(prompt, schema=None) for prompt in fixed_workload(EXTRACT).prompts[: given.prompts]]
    passes = {
        name: asyncio.run(answer_thrice(prompts, given.max_tokens, stack_options(given.model, arguments)))
        for name, arguments in (("shared", []), ("alone", ["--shared-answers-ttl-s", "0"]))
    }
    ratios = {name: ratios_of(of) for name, of in passes.items()}
    is_same = len({one.tokens for of in passes.values() for one in of.values()}) == 1
    is_met = ratios["shared"]["acceptance"] >= BOUND
    report: dict[str, Any] = {
        "bound": BOUND,
        **vars(given),
        "passes": {name: {at: one.report() for at, one in of.items()} for name, of in passes.items()},
        "replaced_by_again": ratios,
        "same_tokens": is_same,
        "met": is_met and is_same,
    }
    write_record(result_path("shared-answers"), report)
    for name, of in report["passes"].items():
        print(*(f"{name} {at}: {one}" for at, one in of.items()), f"{name}: {ratios[name]}", sep="\n")
    return 0 if report["met"] else 1


def ratios_of(passes: Mapping[str, Pass]) -> dict[str, float]:
    """Return how the pass after the replacement compares with the one before."""
    before, after = passes[AGAIN], passes[REPLACED]
    return {
        "acceptance": after.acceptance / before.acceptance,
        "tokens_per_round": after.rounds.tokens_per_round / before.rounds.tokens_per_round,
    }


def stack_options(model: str, arguments: Sequence[str]) -> StackOptions:
    """Return the options of a stack whose lookup drafts have these further arguments."""
    return StackOptions(
        model=model, draft_model=NO_DRAFT_MODEL, drafts=len(DRAFTS), extra_args={"draft": arguments}
    )


async def answer_thrice(prompts: Sequence[Prompt], max_tokens: int, options: StackOptions) -> dict[str, Pass]:
    async with Stack(options) as stack, AsyncClient(stack.gateways[0]) as client:
        loop = GatewayLoop(client)
        passes = {name: await answer(loop, prompts, max_tokens) for name in (FIRST, AGAIN)}
        for draft in DRAFTS:
            await stack.kill(draft)
            await stack.restart(draft)
        # A draft reads what others saw once a workload is used, and gateways use it once they know its lease.
        for _ in range(_MOST_PRIMING):
            primed = await answer(loop, prompts[: len(DRAFTS)], max_tokens)
            if {of.source for of in primed.rounds.sources} & {NGRAM, SHARED}:
                break
        passes[REPLACED] = await answer(loop, prompts, max_tokens)
    return passes


async def answer(loop: GatewayLoop, prompts: Sequence[Prompt], max_tokens: int) -> Pass:
    load = Load(0, ARM, len(DRAFTS), 0.0, tuple(prompts), max_tokens, seed=1)
    block = await loop.run(load)
    return Pass(speculated([block]), tuple(answer.tokens for answer in block.answers))


if __name__ == "__main__":
    sys.exit(main())
