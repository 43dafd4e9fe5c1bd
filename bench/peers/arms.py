"""Compare engines with one another, with and without the stack around them.

An engine alone is one process that decodes without a gateway. `engine` is that of a target; `vllm` and
`vllm-ngram` are vLLM without Galley, plain and with prompt lookup. It gets token ids and is stepped in its
process without a server, which favours it. All other arms, such as `off`, `auto` and `ngram-4`, go through
client, gateway, draft, target and Valkey; the gateway gets text, tokenizes, detokenizes, logs and streams.
`:int8` and `:vllm` after an arm's name say that the target has int8 weights or runs vLLM: `off:vllm`,
`engine:int8`. All arms have the same weights, the same prompts but for a tag, and the same number of tokens,
and the processes of each side share the same cores.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil

from bench.loops.run import Run
from bench.loops.sides import Cpu, Encode, process_loop, stack_pids
from bench.peers.processes import (
    VLLM_ARGS,
    Command,
    check_engine,
    galley_command,
    peer_command,
    vllm_python,
)
from galley.bench.closed_loop import GatewayLoop, LoopSide
from galley.client.client import AsyncClient
from galley.common.models.tokenizer import Tokenizer
from galley.stack.stack import Stack, StackOptions

ENGINE, VLLM, VLLM_NGRAM = "engine", "vllm", "vllm-ngram"
PAGED, INT8, ON_VLLM = "", ":int8", ":vllm"
_TARGETS = {
    PAGED: (),
    INT8: ("--quantization", "int8"),
    ON_VLLM: ("--engine", "vllm", "--vllm-args", VLLM_ARGS),
}
"""The flags of the target, by the end of an arm's name."""


def encoder(model_dir: Path) -> Encode:
    """Return a function from messages to the token ids that the gateway makes of them."""
    return Tokenizer.load(str(model_dir)).encode_chat


@asynccontextmanager
async def start(run: Run) -> AsyncIterator[Mapping[str, LoopSide]]:
    """Start each arm that is a process of its own, and a stack for each engine of all the others."""
    sides: dict[str, LoopSide] = {}
    async with AsyncExitStack() as held:
        for arm in run.options.arms:
            if (command := _command_of(arm, run)) is not None:
                log = run.folder / f"{arm}.log"
                side = await held.enter_async_context(process_loop(*command, log, encoder(run.model_dir)))
                sides[arm], run.facts[arm] = side, side.ready
                runs, target = split(arm)
                if runs == ENGINE:
                    check_engine(side.ready, *_TARGETS[target])
        behind = [arm for arm in run.options.arms if arm not in sides]
        for target in dict.fromkeys(split(arm)[1] for arm in behind):
            stack = await held.enter_async_context(Stack(_stack_of(target, run)))
            client = await held.enter_async_context(AsyncClient(stack.gateways[0]))
            cpu = Cpu(list(stack_pids(stack).values()), children=True)
            for runs, its_target in map(split, behind):
                if its_target == target:
                    sides[runs + target] = GatewayLoop(client, cpu.seconds, runs)
            process = psutil.Process(stack.pid("target"))
            _note_memory(run, f"target{target}_rss_idle", process)
            held.callback(_note_memory, run, f"target{target}_rss_after", process)
        yield sides


def split(arm: str) -> tuple[str, str]:
    """Return what the arm runs, and the end of its name. Raises ValueError if that is unknown."""
    runs, colon, rest = arm.partition(":")
    if colon + rest not in _TARGETS:
        raise ValueError(
            f"--arms: must end with one of {', '.join(filter(None, _TARGETS))} or none, got {arm}"
        )
    return runs, colon + rest


def _command_of(arm: str, run: Run) -> Command | None:
    """Return the command of an arm that is one process, None for those behind a gateway."""
    options, most = run.options, max(run.options.streams)
    runs, target = split(arm)
    if runs == ENGINE:
        return galley_command(run.model_dir, options.dtype, options.threads, *_TARGETS[target])
    if runs in {VLLM, VLLM_NGRAM}:
        return peer_command(
            run.model_dir,
            options.dtype,
            most,
            ngram=runs == VLLM_NGRAM,
            whole_context=bool(options.prompts),
        )
    return None


def _stack_of(target: str, run: Run) -> StackOptions:
    options = run.options
    given = StackOptions(model=options.model, dtype=options.dtype, threads=options.threads)
    if target == ON_VLLM:
        return replace(given, engine="vllm", vllm_args=VLLM_ARGS, target_python=str(vllm_python()))
    return replace(given, extra_args={"target": _TARGETS[target]})


def _note_memory(run: Run, fact: str, process: psutil.Process) -> None:
    run.facts[fact] = process.memory_info().rss
