"""Measure how often draft tokens are right: `make bench-acceptance`.

The running system answers held-out prompts at each temperature. Then the draft's strategies propose a chain
and a tree at every position of these answers. transformers computes the distributions of draft and target.

- The first token of a chain, and the first 1 to 4 candidates of a position: their measured acceptance must
  lie within the sampling interval of what the distributions say (bench/acceptance/closed_form.py).
- Trees are compared with chains, each with the number of draft tokens that is best for it: at the cost of
  rows of a GPU that is bound by bandwidth, where drafting is free, and at the costs measured on this CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from bench.acceptance.closed_form import DRAWS, Agreement, agreement
from bench.acceptance.full_head import load_assistant
from bench.acceptance.heldout import Chances, answers_at, chances_of
from bench.acceptance.prices import GPU, Best, Costs
from bench.acceptance.walk import CHAIN_TOKENS, TREE_NODES, Walk, Walker
from bench.harness import RESULTS, Goal, goal_lines, prompt_hashes, result_path, write_record
from bench.peers.arms import encoder
from galley.bench.closed_loop import GatewayLoop
from galley.bench.workloads import mixed_workload
from galley.client.client import AsyncClient
from galley.common.models.files import DEFAULT_MODEL
from galley.core.cost.model import StepTimes
from galley.core.sampling_params import SamplingParams
from galley.engine.load.resolve import resolve_model
from galley.engine.model import load_model
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from galley.stack.parts import draft_model_of
from galley.stack.stack import Stack, StackOptions

TEMPERATURES = (0.0, 0.7, 1.0)
LISTS = 4
WIDTH = 8
FIRST_GOALS = {0.0: 0.70, 0.7: 0.60, 1.0: 0.42}
PAIR_GOALS = {0.7: 0.75, 1.0: 0.50}
TREE_GOAL, TREE_GOAL_AT = 1.3, 0.7


@dataclass(frozen=True, slots=True)
class Findings:
    """Measurements at one temperature; `lists[m - 1]` is the acceptance of the first m candidates.

    `expected` is the closed form of one candidate, `optimal` the best any draft could have with these
    distributions; greedy tokens have neither. `forms` are (chain, tree) at each of the costs.
    """

    temperature: float
    positions: int
    lists: tuple[float, ...]
    expected: Agreement | None
    optimal: float | None
    expected_lists: tuple[Agreement, ...]
    forms: dict[str, tuple[Best, Best]]


@dataclass(frozen=True, slots=True)
class Models:
    """The draft as it drafts, and draft and target as transformers computes them."""

    walker: Walker
    pair: tuple[Any, Any]


async def answer_all(
    arguments: argparse.Namespace, options: StackOptions
) -> tuple[dict[float, list[tuple[int, ...]]], StepTimes]:
    """Return the answers by temperature, and the times of the target's steps."""
    prompts = mixed_workload().prompts[: arguments.prompts]
    async with Stack(options) as stack, AsyncClient(stack.gateways[0]) as client:
        side = GatewayLoop(client)
        answers = {
            temperature: await answers_at(
                side,
                prompts,
                temperature=temperature,
                max_tokens=arguments.max_tokens,
                seed=arguments.seed,
            )
            for temperature in TEMPERATURES
        }
        async with grpc.aio.insecure_channel(stack.address("target")) as channel:
            info = await rpc.TargetStub(channel).GetTargetInfo(pb.GetTargetInfoRequest())
    return answers, StepTimes.measured([(cost.rows, cost.ns) for cost in info.row_costs])


def examine(
    arguments: argparse.Namespace,
    answers: dict[float, list[tuple[int, ...]]],
    models: Models,
    times: StepTimes,
) -> list[Findings]:
    """Propose along all answers, and compare."""
    encode = encoder(resolve_model(arguments.model))
    prompts = [encode(prompt.messages) for prompt in mixed_workload().prompts[: arguments.prompts]]
    found = []
    for temperature, of_prompts in answers.items():
        pairs = list(zip(prompts, of_prompts, strict=True))
        walks = [
            models.walker.walk(
                prompt, answer, SamplingParams(temperature=temperature, seed=arguments.seed + at)
            )
            for at, (prompt, answer) in enumerate(pairs)
        ]
        rng = np.random.default_rng(arguments.seed)
        chances = [
            one
            for prompt, answer in (pairs if temperature else ())
            for one in chances_of(answer, prompt, models.pair, temperature, LISTS, rng)
        ]
        own = Costs(lambda rows: times(rows) / times(1), models.walker.step_s * 1e9 / times(1))
        found.append(findings_of(temperature, of_prompts, walks, chances, {"gpu": GPU, "cpu": own}))
        print(f"temperature {temperature}: {found[-1].positions} positions", flush=True)
    return found


def findings_of(
    temperature: float,
    answers: Sequence[Sequence[int]],
    walks: Sequence[Walk],
    chances: Sequence[Chances],
    costs: dict[str, Costs],
) -> Findings:
    listed = [candidates for walk in walks for candidates in walk.listed]
    tokens = [token for answer in answers for token in answer]
    right = [
        [token in candidates[:most] for candidates, token in zip(listed, tokens, strict=True)]
        for most in range(1, LISTS + 1)
    ]
    chains, trees = [walk.chains for walk in walks], [walk.trees for walk in walks]
    return Findings(
        temperature=temperature,
        positions=len(tokens),
        lists=tuple(float(np.mean(of)) for of in right),
        expected=agreement(right[0], [one.first for one in chances]) if chances else None,
        optimal=float(np.mean([one.optimal for one in chances])) if chances else None,
        expected_lists=tuple(
            agreement(right[at], [one.lists[at] for one in chances], DRAWS)
            for at in range(LISTS if chances else 0)
        ),
        forms={
            name: (cost.best(chains, CHAIN_TOKENS), cost.best(trees, TREE_NODES))
            for name, cost in costs.items()
        },
    )


def goals_of(found: Findings) -> list[Goal]:
    """Return the goals of one temperature."""
    at = found.temperature
    goals = [_least(f"first-{at:g}", "right first tokens of chains", found.lists[0], FIRST_GOALS[at], at)]
    if at in PAIR_GOALS:
        goals.append(_least(f"pair-{at:g}", "right tokens in lists of 2", found.lists[1], PAIR_GOALS[at], at))
    if found.expected is not None:
        what = f"first candidate beside the closed form (optimal coupling: {found.optimal:.3f})"
        goals.append(_agrees(f"closed-form-{at:g}", what, found.expected))
    for most, expected in enumerate(found.expected_lists, 1):
        what = f"first {most} candidates beside their chances by the distributions"
        goals.append(_agrees(f"list-{most}-{at:g}", what, expected))
    if at == TREE_GOAL_AT:
        chain, tree = found.forms["gpu"]
        what = f"trees of {tree.draft_tokens} over chains of {chain.draft_tokens} draft tokens, rows at 0.4 %"
        ratio = tree.speed / chain.speed
        goals.append(_least(f"tree-{at:g}", what, ratio, TREE_GOAL, at))
    return goals


def _least(name: str, what: str, measured: float, bound: float, at: float) -> Goal:
    return Goal(
        name, f"{what}, temperature {at:g}", f"{measured:.3f}", f">= {bound:g}", met=measured >= bound
    )


def _agrees(name: str, what: str, found: Agreement) -> Goal:
    bound = f"{found.expected:.4f} [{found.low:.4f}, {found.high:.4f}]"
    return Goal(name, f"{what}, {found.positions} positions", f"{found.measured:.4f}", bound, found.agrees)


def _models(arguments: argparse.Namespace, options: StackOptions) -> Models:
    target_dir, spec = resolve_model(arguments.model), draft_model_of(options) or ""
    model = load_model(
        spec, dtype="bfloat16", device="cpu", threads=arguments.threads, target_model=arguments.model
    )
    target: Any = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.bfloat16)  # nosec B615  # a directory
    pair = (target.eval(), load_assistant(resolve_model(spec), target_dir, torch.bfloat16))
    return Models(Walker(model, WIDTH), pair)


def main() -> int:
    """Run the benchmark; return 0 even if a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.acceptance", description=__doc__)
    parser.add_argument("--prompts", type=int, default=24, help="held-out prompts (default: %(default)s)")
    parser.add_argument(
        "--max-tokens", type=int, default=48, help="most tokens of an answer (default: %(default)s)"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="threads of each service (default: %(default)s)"
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="target model: hub id or directory")
    parser.add_argument("--seed", type=int, default=20261123, help="seed of the first answer")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the record")
    arguments = parser.parse_args()
    options = StackOptions(model=arguments.model, threads=arguments.threads, dtype="bfloat16")
    answers, times = asyncio.run(answer_all(arguments, options))
    models = _models(arguments, options)
    found = examine(arguments, answers, models, times)
    goals = [goal for one in found for goal in goals_of(one)]
    record = {
        "prompt_sha256": prompt_hashes(),
        "width": WIDTH,
        "draft_step_ms": round(models.walker.step_s * 1e3, 3),
        "row_ns": times.points,
        "temperatures": [dataclasses.asdict(one) for one in found],
        "goals": [dataclasses.asdict(goal) for goal in goals],
    }
    write_record(result_path("acceptance", arguments.results), record)
    print(*goal_lines(goals), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
