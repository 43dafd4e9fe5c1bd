"""Compare the draft's acceptance at temperature 1 with what its distributions say: `make bench-coupling`.

The running system answers held-out prompts at temperature 1. At every position the running draft proposes one
token, and transformers computes the distributions of draft and target. With shared noise a draft token is
accepted with a known probability (`bench/coupling/closed_form.py`); the measured rate must lie within its
sampling interval. The rate of the optimal coupling is printed too.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.coupling.closed_form import Agreement, agreement
from bench.coupling.full_head import load_assistant
from bench.coupling.heldout import answers_at_one, guesses, scored
from bench.harness import RESULTS, Goal, goal_lines, prompt_hashes, result_path, write_record
from bench.peers.arms import encoder
from galley.bench.closed_loop import GatewayLoop
from galley.bench.workloads import mixed_workload
from galley.client.client import AsyncClient
from galley.common.models.files import DEFAULT_MODEL
from galley.engine.load.resolve import resolve_model
from galley.stack.parts import draft_model_of
from galley.stack.stack import Stack, StackOptions


async def measure(arguments: argparse.Namespace, model_dir: Path) -> Agreement:
    """Answer the prompts, request a draft token at every position, and compare them with the closed form."""
    prompts = mixed_workload().prompts[: arguments.prompts]
    encode = encoder(model_dir)
    encoded = [encode(prompt.messages) for prompt in prompts]
    options = StackOptions(model=arguments.model, threads=arguments.threads, dtype="bfloat16")
    async with Stack(options) as stack, AsyncClient(stack.gateways[0]) as client:
        answers = await answers_at_one(GatewayLoop(client), prompts, arguments.max_tokens, arguments.seed)
        guessed = await guesses(stack.address("draft"), answers, encoded, arguments.seed)
    return agreement(await scored(answers, encoded, guessed, _models(options, model_dir), print))


def _models(options: StackOptions, model_dir: Path) -> tuple[Any, Any]:
    target: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)  # nosec B615  # a directory
    draft_dir = resolve_model(draft_model_of(options) or "")
    return target.eval(), load_assistant(draft_dir, model_dir, torch.bfloat16)


def goal_of(found: Agreement) -> Goal:
    """Bound the measured acceptance by the sampling interval of the closed form."""
    what = (
        f"acceptance of the model draft at temperature 1, {found.positions} positions "
        f"(optimal coupling: {found.optimal:.4f})"
    )
    bound = f"{found.closed:.4f} [{found.low:.4f}, {found.high:.4f}]"
    return Goal("coupling", what, f"{found.measured:.4f}", bound, found.agrees)


def main() -> int:
    """Run the benchmark; return 0 even if the goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.coupling", description=__doc__)
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
    found = asyncio.run(measure(arguments, resolve_model(arguments.model)))
    goal = goal_of(found)
    record = {
        "prompt_sha256": prompt_hashes(),
        "agreement": dataclasses.asdict(found),
        "goals": [dataclasses.asdict(goal)],
    }
    write_record(result_path("coupling", arguments.results), record)
    print(*goal_lines([goal]), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
