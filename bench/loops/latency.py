"""Measure the time to first token of short and long prompts, and the time between tokens, beside vLLM.

Arms are `off:1`, `off:2` and `auto:2`, whose target has that many threads, and `vllm`, if its environment
exists: vLLM without Galley, stepped in its own process without a server, which favours it. No prompt is in a
cache, and all streams of a block ask at once. In the workload `interrupted` a long prompt arrives while
OTHERS streams are decoding; the time between their tokens meanwhile is judged.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import chain, pairwise
from statistics import mean, median

from bench.harness import Goal, at_most
from bench.loops.options import Options
from bench.loops.run import Run, Scenario, of_arm, own_tag
from bench.loops.sides import Cpu, process_loop, stack_pids
from bench.peers.arms import VLLM, encoder
from bench.peers.processes import peer_command, vllm_python
from galley.bench.closed_loop import AUTO, OFF, GatewayLoop, LoopBlock, LoopSide
from galley.bench.summary import MS, Interval, median_interval, percentile, ratio_interval
from galley.bench.workloads import TASKS, Prompt, Workload, fixed_workload
from galley.client.client import AsyncClient
from galley.stack.stack import Stack, StackOptions

SHORT, LONG, INTERRUPTED = "short", "long", "interrupted"
OURS = f"{OFF}:2"
OTHERS = 8
ALONE, AT_ONCE = 1, 16
MOST_AGAINST_VLLM, MOST_BETWEEN_MS = 1.0, 150.0
# About 100 and 1,500 tokens of the default model.
_WORDS = {SHORT: 56, LONG: 1195}
# Sets without programs, whose words are more tokens.
_SETS = ("chat", "support", TASKS)
_TEXTS = 24
# The others have begun to decode when the long prompt arrives, and have not ended when it is read.
_ARRIVES_S, _OTHERS_TOKENS, _LATE_TOKENS = 1.5, 160, 4
_KV_MB = 1024


def texts(kind: str, count: int) -> list[str]:
    """Return texts of as many words as prompts of this kind have, each from another place of the sets."""
    every = [prompt.text for name in _SETS for prompt in fixed_workload(name).prompts]
    words = " ".join(every).split()
    starts = [at * len(words) // count for at in range(count)]
    return [" ".join((words + words)[start : start + _WORDS[kind]]) for start in starts]


def workloads(_options: Options) -> list[Workload]:
    """Return short and long prompts, and short ones that a long one interrupts."""
    found = [
        Workload(kind, tuple(_prompts(kind, _TEXTS)), "", streams=(ALONE, AT_ONCE)) for kind in (SHORT, LONG)
    ]
    late = _prompts(LONG, 2, max_tokens=_LATE_TOKENS, arrives_s=_ARRIVES_S)
    others = _prompts(SHORT, 2 * OTHERS, max_tokens=_OTHERS_TOKENS)
    groups = ((*others[:OTHERS], late[0]), (*others[OTHERS:], late[1]))
    return [*found, Workload(INTERRUPTED, tuple(chain.from_iterable(groups)), "", streams=(OTHERS + 1,))]


def _prompts(kind: str, count: int, *, max_tokens: int = 0, arrives_s: float = 0.0) -> list[Prompt]:
    return [
        Prompt(
            f"{kind}-{at:02}", f"Continue this text.\n\n{text}", max_tokens=max_tokens, arrives_s=arrives_s
        )
        for at, text in enumerate(texts(kind, count))
    ]


@asynccontextmanager
async def start(run: Run) -> AsyncIterator[Mapping[str, LoopSide]]:
    """Start vLLM, if it is an arm, and a stack for each number of threads."""
    options = run.options
    encode = encoder(run.model_dir)
    for kind in (SHORT, LONG):
        lengths = [len(encode(prompt.messages)) for prompt in _prompts(kind, _TEXTS)]
        run.facts[f"tokens_{kind}"] = round(mean(lengths))
    sides: dict[str, LoopSide] = {}
    async with AsyncExitStack() as held:
        if VLLM in options.arms:
            command = peer_command(run.model_dir, options.dtype, max(options.streams))
            log = run.folder / "vllm.log"
            sides[VLLM] = await held.enter_async_context(process_loop(*command, log, encode))
        by_threads: dict[int, list[str]] = {}
        for arm in options.arms:
            if arm != VLLM:
                by_threads.setdefault(_split(arm)[1], []).append(arm)
        for threads, arms in by_threads.items():
            stack = await held.enter_async_context(Stack(_stack_options(options, threads)))
            client = await held.enter_async_context(AsyncClient(stack.gateways[0]))
            cpu = Cpu(list(stack_pids(stack).values()), children=True)
            sides |= {arm: GatewayLoop(client, cpu.seconds, _split(arm)[0]) for arm in arms}
        yield sides


def _stack_options(options: Options, threads: int) -> StackOptions:
    kv = {"target": ["--kv-memory-mb", str(_KV_MB)]}
    return StackOptions(model=options.model, dtype=options.dtype, threads=threads, extra_args=kv)


def _split(arm: str) -> tuple[str, int]:
    speculation, _, threads = arm.partition(":")
    return speculation, int(threads)


def check(options: Options) -> str:
    """Return what is wrong with the arms, or an empty string."""
    for arm in options.arms:
        speculation, _, threads = arm.partition(":")
        if arm != VLLM and not (speculation in {OFF, AUTO} and threads.isdigit() and int(threads)):
            return f"--arms: must be of {VLLM}, {OFF}:<threads> and {AUTO}:<threads>, got {arm}"
    return ""


def first_token_ms(block: LoopBlock) -> float:
    """Return the median time to first token of a block's answers."""
    return MS * median(answer.at_s[0] for answer in block.answers if answer.at_s)


def between_ms(block: LoopBlock) -> list[float]:
    """Return the times between the other streams' tokens while the late prompt of a block is read.

    Tokens that came in one message are one.
    """
    late = next(at for at, prompt in enumerate(block.load.prompts) if prompt.arrives_s)
    begin_s = block.requested_s[late]
    end_s = begin_s + block.answers[late].at_s[0]
    return [
        MS * (after - before)
        for at, answer in enumerate(block.answers)
        if at != late
        for before, after in _pairs(block.requested_s[at], answer.at_s)
        if after > begin_s and before < end_s
    ]


def _pairs(requested_s: float, at_s: Sequence[float]) -> Iterator[tuple[float, float]]:
    return pairwise(requested_s + seconds for seconds in dict.fromkeys(at_s))


def goals(run: Run) -> list[Goal]:
    """Judge long prompts against vLLM, and the others' time between tokens by its bound."""
    found = []
    for streams in (ALONE, AT_ONCE):
        for kind in (SHORT, LONG):
            ratio = against_vllm(_of(run, kind, OURS, streams), _of(run, kind, VLLM, streams))
            if ratio is not None:
                run.facts[f"first_token_{kind}_{streams}_against_vllm"] = str(ratio)
            if ratio is not None and kind == LONG:
                what = f"time to first token, long prompts, {streams} at once, {OURS} against vLLM"
                found.append(at_most("first-token", what, ratio, MOST_AGAINST_VLLM, "x"))
    return [*found, *_between_goals(run)]


def _between_goals(run: Run) -> list[Goal]:
    found = []
    for arm in run.options.arms:
        times = [between_ms(block) for block in _of(run, INTERRUPTED, arm, OTHERS + 1)]
        worst = [percentile(of_block, 99) for of_block in times if of_block]
        what = f"time between tokens of {OTHERS} others while a long prompt is read, p99, {arm}"
        if worst:
            middle = median_interval(worst)
            run.facts[f"between_tokens_{arm}_ms"] = f"{middle} of {len(worst)} blocks"
            goal = at_most("between-tokens", what, middle, MOST_BETWEEN_MS, " ms")
        else:
            bound = f"<= {MOST_BETWEEN_MS:g} ms"
            goal = Goal("between-tokens", what, "others had ended", bound, met=False)
        if times and arm != VLLM:
            found.append(goal)
    return found


def against_vllm(ours: Sequence[LoopBlock], theirs: Sequence[LoopBlock]) -> Interval | None:
    """Return the ratio of the pairs' times to first token; None without pairs."""
    if not ours or not theirs:
        return None
    return ratio_interval([*map(first_token_ms, ours)], [*map(first_token_ms, theirs)])


def _of(run: Run, workload: str, arm: str, streams: int) -> list[LoopBlock]:
    return [block for block in of_arm(run.blocks, arm, streams) if block.load.workload == workload]


def _arms() -> tuple[str, ...]:
    """Return the arms that can run here: without vLLM if its environment was not made."""
    ours = (f"{OFF}:1", OURS, f"{AUTO}:2")
    try:
        vllm_python()
    except FileNotFoundError:
        return ours
    return (*ours, VLLM)


LATENCY = Scenario(
    "latency",
    "time to first token of short and long prompts, and time between tokens, beside vLLM",
    Options(_arms(), streams=(ALONE, OTHERS + 1, AT_ONCE), temperatures=(0.0,), turns=1, prompts_per_block=2),
    OURS,
    start,
    goals,
    tag_of=own_tag,
    workloads=workloads,
    required=frozenset({OURS}),
    check=check,
)
