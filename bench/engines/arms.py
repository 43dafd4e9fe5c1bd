"""Compare engines with one another, with and without the stack around them.

An engine alone is one process that decodes without a gateway: `paged` is Galley's own; `vllm` and
`vllm-ngram` are vLLM without Galley, plain and with prompt lookup. It gets token ids and is stepped in its
process without a server, which favours it. All other arms, such as `off`, `auto` and `ngram-4`, go through
client, gateway, draft, target and Valkey; the gateway gets text, tokenizes, detokenizes, logs and streams.
All arms have the same weights, the same prompts but for a tag, and the same number of tokens, and the
processes of each side share the same cores.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import psutil

from bench.engines.processes import Command, galley_command, peer_command
from bench.loops.run import Run
from bench.loops.sides import Cpu, process_loop, stack_pids
from galley.bench.closed_loop import GatewayLoop, LoopSide
from galley.client.client import AsyncClient
from galley.common.models.tokenizer import Tokenizer
from galley.stack.stack import Stack, StackOptions

PAGED, VLLM, VLLM_NGRAM = "paged", "vllm", "vllm-ngram"


def behind_gateway(speculation: str, engine: str = PAGED) -> str:
    """Return the name of an arm that goes through a gateway."""
    return speculation if engine == PAGED else f"{speculation}:{engine}"


def encoder(model_dir: Path) -> Callable[[str], list[int]]:
    """Return a function from a user turn to the token ids that the gateway makes of it."""
    tokenizer = Tokenizer.load(str(model_dir))
    return lambda text: tokenizer.encode_chat([{"role": "user", "content": text}])


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
        gateways = [arm for arm in run.options.arms if arm not in sides]
        for engine in _engines(gateways):
            stack = await held.enter_async_context(Stack(_stack_of(engine, run)))
            client = await held.enter_async_context(AsyncClient(stack.gateways[0]))
            cpu = Cpu(list(stack_pids(stack).values()), children=True)
            for arm in gateways:
                if _engine_of(arm) == engine:
                    sides[arm] = GatewayLoop(client, cpu.seconds, arm.partition(":")[0])
            target = psutil.Process(stack.pid("target"))
            run.facts[f"{engine}_target_rss_idle"] = target.memory_info().rss
            held.callback(_note_memory, run, engine, target)
        yield sides


def _engine_of(arm: str) -> str:
    return arm.partition(":")[2] or PAGED


def _engines(arms: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(map(_engine_of, arms)))


def _note_memory(run: Run, engine: str, target: psutil.Process) -> None:
    run.facts[f"{engine}_target_rss_after"] = target.memory_info().rss


def _command_of(arm: str, run: Run) -> Command | None:
    """Return the command of an arm that is one process, None for those behind a gateway."""
    options, most = run.options, max(run.options.streams)
    if arm == PAGED:
        return galley_command("paged", run.model_dir, options.dtype, options.threads)
    if arm in {VLLM, VLLM_NGRAM}:
        return peer_command(run.model_dir, options.dtype, most, ngram=arm == VLLM_NGRAM)
    return None


def _stack_of(engine: str, run: Run) -> StackOptions:
    if engine != PAGED:
        raise ValueError(f"--arms: the engine must be {PAGED}, got {engine!r}")
    return StackOptions(model=run.options.model, dtype=run.options.dtype, threads=run.options.threads)
